"""Everyday words for icon ids: the first name of an id is its canonical one, all are trained."""

# id -> canonical name, where the id with spaces is not what a person would write.
CANONICAL: dict[str, str] = {
    "piata": "pinata",
    "jack-o-lantern": "jack-o'-lantern",
    "mans-shoe": "man's shoe",
    "womans-boot": "woman's boot",
    "womans-clothes": "woman's clothes",
    "womans-hat": "woman's hat",
    "womans-sandal": "woman's sandal",
    "mens-room": "men's room",
    "womens-room": "women's room",
    "rescue-workers-helmet": "rescue worker's helmet",
    "zzz": "zzz",
}

# id -> further names. A name may belong to one id only; the build checks it.
_TABLE = """
automobile: car, motor car, auto
sport-utility-vehicle: suv, jeep, off-road car
racing-car: race car, formula one car, sports car
delivery-truck: truck, van, moving truck
articulated-lorry: lorry, semi truck, trailer truck
pickup-truck: pickup
fire-engine: fire truck, firetruck
police-car: cop car
locomotive: steam train, steam engine
motorcycle: motorbike
bicycle: bike, cycle, push bike
kick-scooter: scooter
motor-scooter: moped, vespa
airplane: plane, aeroplane, jet, aircraft
airplane-arrival: landing plane, plane landing
airplane-departure: plane taking off
helicopter: chopper
rocket: spaceship, space rocket, rocket ship
flying-saucer: ufo, alien ship
sailboat: boat, sailing boat, yacht
speedboat: fast boat
passenger-ship: cruise ship
motor-boat: motorboat
ship: ocean liner
tractor: farm tractor
taxi: cab
dog-face: puppy, pup, doggy, puppy face
dog: hound
cat-face: kitty, kitten, kitten face
cat: feline
rabbit-face: bunny, bunny face
rabbit: hare
baby-chick: chick, little chick
front-facing-baby-chick: chick front view
hatching-chick: chick in an egg
chicken: hen
rooster: cockerel
horse-face: horse head, pony
horse: galloping horse
cow-face: cow head
pig-face: piglet, pig head
mouse-face: mouse head
tiger-face: tiger head
monkey-face: monkey head, ape face
ox: bull
ram: male sheep
ewe: sheep, lamb
sauropod: dinosaur, brontosaurus, long neck dinosaur
t-rex: tyrannosaurus, tyrannosaurus rex
crocodile: alligator, croc
lady-beetle: ladybug, ladybird
honeybee: bee, bumblebee
bug: caterpillar
polar-bear: white bear
bear: bear face, grizzly
panda: panda bear
lion: lion face
fox: fox face
wolf: wolf face
frog: frog face, toad
unicorn: unicorn face
hippopotamus: hippo
rhinoceros: rhino
orangutan: orang utan
two-hump-camel: bactrian camel
camel: dromedary
tropical-fish: clownfish
blowfish: pufferfish
shrimp: prawn
spouting-whale: happy whale
octopus: octopus with tentacles
spider-web: cobweb, web
bat: flying bat
owl: wise owl
dove: white dove, pigeon
bird: little bird
blackbird: crow, raven
phoenix-bird: phoenix
poodle: fluffy dog
guide-dog: seeing eye dog
red-apple: apple, ripe apple
green-apple: granny smith, granny smith apple
tangerine: mandarin, orange fruit, clementine
grapes: bunch of grapes
cherries: cherry, two cherries
strawberry: strawberries
blueberries: blueberry
kiwi-fruit: kiwi
watermelon: slice of watermelon
hot-pepper: chili, chilli, chili pepper
bell-pepper: capsicum, green pepper
eggplant: aubergine
ear-of-corn: corn, maize, corn cob
french-fries: fries, chips, french fry
hamburger: burger, cheeseburger
hot-dog: hotdog
doughnut: donut, donuts
pizza: slice of pizza, pizza slice
spaghetti: pasta, noodles
cooking: fried egg
egg: eggs
bread: loaf of bread, loaf
baguette-bread: baguette, french bread
cheese-wedge: cheese, piece of cheese
cut-of-meat: steak
poultry-leg: chicken leg, drumstick
meat-on-bone: leg of meat
ice-cream: ice cream sundae
soft-ice-cream: ice cream cone, soft serve
birthday-cake: cake, cake with candles
shortcake: piece of cake, slice of cake
cookie: biscuit, chocolate chip cookie
chocolate-bar: chocolate
candy: sweet, sweets
lollipop: lolly
honey-pot: honey, pot of honey, jar of honey
hot-beverage: coffee, cup of coffee, cup of tea, hot drink
teacup-without-handle: tea, green tea
glass-of-milk: milk
beer-mug: beer, mug of beer, pint of beer
clinking-beer-mugs: two beers, cheers
wine-glass: wine, glass of wine, red wine
cocktail-glass: martini, cocktail
tropical-drink: cocktail with umbrella
cup-with-straw: soda, soft drink, cola
beverage-box: juice box, juice
tumbler-glass: whisky, whiskey
bottle-with-popping-cork: champagne, champagne bottle
cooked-rice: rice, bowl of rice
curry-rice: curry
green-salad: salad
steaming-bowl: ramen, noodle soup, bowl of noodles
pot-of-food: stew
sandwich: sub
stuffed-flatbread: kebab, pita
pancakes: pancake
takeout-box: chinese takeout
sushi: nigiri
brown-mushroom: champignon
mushroom: toadstool
deciduous-tree: tree, leafy tree
evergreen-tree: pine tree, fir tree, pine
christmas-tree: xmas tree
palm-tree: palm, coconut tree
potted-plant: plant, houseplant
seedling: sprout
four-leaf-clover: clover, lucky clover
maple-leaf: red leaf, autumn leaf
fallen-leaf: brown leaves, autumn leaves
bouquet: bunch of flowers, flowers
blossom: flower, yellow flower
cherry-blossom: sakura, pink flower
rose: red rose
wilted-flower: dead rose, wilted rose
tulip: pink tulip
sun: sunshine
sun-with-face: smiling sun, sun face
crescent-moon: moon
full-moon-face: moon with a face
full-moon: round moon
star: yellow star
glowing-star: shining star
shooting-star: falling star
high-voltage: lightning, lightning bolt, thunderbolt, bolt
cloud-with-rain: rain cloud, rain
cloud-with-snow: snow cloud
cloud-with-lightning: storm cloud, thunder cloud
cloud-with-lightning-and-rain: thunderstorm
fire: flame, flames
water-wave: wave, ocean wave, big wave
droplet: water drop, drop of water, raindrop
sweat-droplets: splashing water
tornado: twister, whirlwind
snowflake: flake of snow
umbrella-with-rain-drops: umbrella in the rain
umbrella: parasol
closed-umbrella: folded umbrella
globe-showing-europe-africa: globe, earth, planet earth
globe-showing-americas: earth americas
globe-showing-asia-australia: earth asia
ringed-planet: saturn, planet
volcano: erupting volcano
mountain: mountain peak
snow-capped-mountain: snowy mountain
house: home, little house
house-with-garden: house and tree
derelict-house: ruined house, haunted house
office-building: office
castle: fairytale castle
tokyo-tower: eiffel tower
statue-of-liberty: liberty statue
ferris-wheel: big wheel
tent: camping tent
bed: bedroom
couch-and-lamp: sofa, couch
chair: wooden chair
toilet: loo
bathtub: bath, tub
shower: shower head
light-bulb: lightbulb, bulb, lamp, idea
flashlight: torch
candle: burning candle
closed-book: book
books: stack of books, pile of books
open-book: opened book
notebook: notepad
pencil: lead pencil
pen: ballpoint pen
crayon: wax crayon
paintbrush: brush, paint brush
artist-palette: palette, paint palette
scissors: pair of scissors
key: golden key
locked: padlock, lock
unlocked: open lock, open padlock
bell: golden bell
gem-stone: diamond, gem, jewel
ring: diamond ring, wedding ring
money-bag: bag of money, money
coin: gold coin
dollar-banknote: dollar, dollar bill, cash
credit-card: bank card
crown: king's crown, golden crown
top-hat: magician hat, black hat
billed-cap: baseball cap, cap
graduation-cap: mortarboard
t-shirt: tshirt, tee shirt
jeans: trousers, pants, blue jeans
socks: sock, pair of socks
running-shoe: sneaker, shoe, trainers, sneakers
high-heeled-shoe: high heel, high heels, stiletto
hiking-boot: boot, boots
glasses: eyeglasses, spectacles
sunglasses: shades
necktie: tie
gloves: glove, pair of gloves
backpack: rucksack, school bag
handbag: hand bag
purse: wallet
luggage: suitcase
lipstick: lip stick
nail-polish: nail varnish
wrapped-gift: gift, present, gift box, birthday present
party-popper: party, confetti
balloon: party balloon
teddy-bear: teddy, stuffed bear, plush bear
game-die: die, dice
video-game: game controller, gamepad, controller
joystick: arcade stick
puzzle-piece: jigsaw piece, jigsaw, puzzle
chess-pawn: pawn, chess piece
soccer-ball: football, soccer
american-football: gridiron ball
rugby-football: rugby ball
tennis: tennis ball, tennis racket
ping-pong: table tennis
bowling: bowling ball
pool-8-ball: eight ball, billiard ball
trophy: cup prize, golden trophy, winner's cup
1st-place-medal: gold medal, first place medal
2nd-place-medal: silver medal, second place medal
3rd-place-medal: bronze medal, third place medal
bullseye: target, dartboard
guitar: electric guitar
musical-keyboard: piano, piano keys
musical-note: note, music note
musical-notes: music, music notes
microphone: mic, karaoke
headphone: headphones, headset
mobile-phone: phone, smartphone, cell phone, iphone
telephone: old phone, landline
laptop: notebook computer, laptop computer
desktop-computer: computer, pc, monitor
television: tv, tv set, telly
camera: photo camera
movie-camera: film camera
alarm-clock: clock
watch: wristwatch, wrist watch
hourglass-done: hourglass, sandglass
magnifying-glass-tilted-left: magnifying glass, magnifier, search
envelope: letter, mail
red-envelope: red packet
postbox: mailbox, post box, letterbox
package: parcel, box, cardboard box
shopping-cart: trolley, shopping trolley
shopping-bags: shopping bag
wastebasket: trash can, bin, rubbish bin, trash
calendar: date
pushpin: pin, thumbtack
paperclip: paper clip
hammer: claw hammer
wrench: spanner
gear: cog, cogwheel, settings
axe: hatchet
dagger: knife, sword
crossed-swords: swords, two swords
kitchen-knife: chef knife, chef's knife
magic-wand: wand
crystal-ball: fortune teller ball
bomb: black bomb
firecracker: dynamite
boxing-glove: boxing gloves
pill: medicine, tablet, capsule
syringe: injection, needle and syringe
test-tube: science tube
dna: dna helix
skull: death
skull-and-crossbones: poison
ghost: spooky ghost, boo
alien: extraterrestrial
alien-monster: space invader
robot: robot face, bot
pile-of-poo: poop, poo, turd
clown-face: clown
jack-o-lantern: pumpkin, halloween pumpkin, carved pumpkin
snowman: snow man
santa-claus: santa, father christmas
baby-angel: cherub, angel
red-heart: heart, love, love heart
broken-heart: heartbreak
two-hearts: hearts
eye: single eye
eyes: pair of eyes
mouth: lips
tooth: molar
foot: bare foot
thumbs-up: thumb up, like, like button
thumbs-down: thumb down, dislike
clapping-hands: applause
waving-hand: wave hello, hello hand
folded-hands: praying hands, prayer
handshake: shaking hands
flexed-biceps: muscle, strong arm, biceps
ok-hand: ok sign, okay sign
victory-hand: peace sign, v sign
writing-hand: hand writing
grinning-face: smiley, happy face, smile
slightly-smiling-face: small smile
face-with-tears-of-joy: laughing face, crying laughing, lol
rolling-on-the-floor-laughing: rofl
smiling-face-with-heart-eyes: heart eyes, in love face
smiling-face-with-sunglasses: cool face
winking-face: wink
crying-face: sad face
loudly-crying-face: sobbing face, bawling
angry-face: mad face
pouting-face: furious face, red angry face
thinking-face: thinking, hmm face
sleeping-face: asleep face
nerd-face: nerd, geek
exploding-head: mind blown
face-with-medical-mask: face mask, sick face
nauseated-face: green sick face
face-blowing-a-kiss: kiss face
smiling-face-with-halo: angel face
smiling-face-with-horns: devil, devil face
cowboy-hat-face: cowboy
police-officer: cop, policeman
firefighter: fireman
cook: chef
health-worker: doctor, nurse
detective: spy
person-superhero: superhero
person-mage: wizard, mage
man-mage: male wizard
woman-mage: witch
person-merpeople: merperson
woman-merpeople: mermaid
person-vampire: vampire
person-zombie: zombie
person-fairy: fairy
person-elf: elf
person-genie: genie
prince: young prince
princess: young princess
old-man: grandfather, grandpa
old-woman: grandmother, grandma
check-mark: tick, checkmark
cross-mark: x mark, red x
stop-sign: stop
no-entry: no entry sign
warning: warning sign, caution
recycling-symbol: recycle, recycling
hundred-points: hundred, 100
red-question-mark: question mark
red-exclamation-mark: exclamation mark, exclamation point
infinity: infinity sign
anchor: ship anchor
fuel-pump: gas pump, petrol pump
traffic: traffic jam
construction: road barrier
bus: city bus
oncoming-bus: bus front
metro: subway
train: train front
fireworks: firework
rainbow: colorful arc
spiral-shell: shell, seashell
bone: dog bone
beach-with-umbrella: beach
desert-island: island, tropical island
circus-tent: circus
roller-coaster: rollercoaster
fork-and-knife: cutlery
chopsticks: pair of chopsticks
peanuts: peanut, nuts
beans: bean
newspaper: paper
floppy-disk: diskette, save icon
optical-disk: cd, compact disc
computer-mouse: pc mouse
printer: office printer
satellite-antenna: satellite dish
telescope: spyglass
fishing-pole: fishing rod
bow-and-arrow: archery
sled: sledge
yarn: ball of yarn, ball of wool, wool
thread: spool of thread
nesting-dolls: matryoshka
kite: flying kite
mirror: looking glass
bucket: pail
broom: broomstick
soap: bar of soap
roll-of-paper: toilet paper, toilet roll
"""


def synonym_table() -> dict[str, list[str]]:
    """id -> further names, as written in the table above."""
    table: dict[str, list[str]] = {}
    for line in _TABLE.strip().splitlines():
        item, _, names = line.partition(":")
        table[item.strip()] = [name.strip() for name in names.split(",") if name.strip()]
    return table
