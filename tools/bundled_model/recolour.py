"""Recolours an SVG icon: the dominant hue family of its fills becomes a named colour."""

import math
import re

# The ten colour words and the sRGB value each one stands for.
COLOURS: dict[str, str] = {
    "red": "#f8312f",
    "orange": "#ff822d",
    "yellow": "#fcd53f",
    "green": "#1fbf5c",
    "blue": "#1f7fe0",
    "purple": "#8d65c5",
    "pink": "#ff7ab8",
    "brown": "#8b5a3c",
    "black": "#2b2b2b",
    "grey": "#9b9b9b",
}

# Soft tints, so that an object of the same colour still shows.
BACKGROUNDS: dict[str, str] = {
    "red": "#f26b6b",
    "orange": "#ffb066",
    "yellow": "#ffe270",
    "green": "#8fd9a0",
    "blue": "#8cbcf5",
    "purple": "#b9a0ea",
    "pink": "#f8b5d6",
    "grey": "#c4c4c4",
    "black": "#2b2b2b",
}

# Icon ids that get recoloured, each with the noun that follows the colour word.
_PLAIN = """
balloon umbrella crown cat dog star fish bird butterfly tulip rose hibiscus blossom mushroom
t-shirt dress jeans socks top-hat scarf gloves backpack handbag purse briefcase luggage bus taxi
train tram locomotive bicycle kick-scooter motor-scooter motorcycle racing-car tractor rocket
airplane helicopter sailboat canoe speedboat ship house tent door chair bed candle light-bulb
notebook pencil pen crayon paintbrush scissors key bell ring party-popper teddy-bear kite guitar
drum trumpet violin saxophone basketball baseball volleyball yo-yo crystal-ball puzzle-piece
joystick telephone camera television radio watch alarm-clock teapot wine-glass tropical-drink
cocktail-glass baby-bottle lollipop candy ice-cream cupcake birthday-cake doughnut cookie
strawberry cherries grapes pear peach lemon banana pineapple watermelon tomato carrot
bell-pepper hot-pepper eggplant egg cucumber broccoli avocado mango melon tangerine kiwi-fruit
dragon frog turtle snake lizard crocodile whale dolphin shark octopus squid crab lobster shrimp
snail beetle bug ant spider honeybee pig cow horse unicorn rabbit mouse rat hamster bear koala
fox wolf lion tiger elephant giraffe camel monkey gorilla duck swan owl eagle parrot penguin
flamingo dove chicken rooster turkey peacock ghost alien robot skull cactus deciduous-tree
evergreen-tree sun crescent-moon cloud fire droplet snowflake triangular-flag fuel-pump anchor
hammer axe wrench screwdriver bucket broom basket toothbrush sponge soap bathtub toilet
shopping-cart magnet thread yarn ribbon necktie glasses sunglasses lipstick postbox castle
magic-wand dagger shield boomerang military-helmet graduation-cap feather bone worm hedgehog
otter sloth beaver raccoon badger deer goat llama donkey zebra kangaroo seal coral jellyfish
oyster spiral-shell bread croissant bagel pretzel pancakes waffle hamburger pizza taco burrito
popcorn bacon onion garlic potato chestnut olive coconut blueberries pea-pod chair accordion
flute long-drum microphone headphone television laptop keyboard printer battery compass toolbox
gear telescope microscope stethoscope syringe pill crutch wheel skateboard sled parachute
""".split()
_NAMED = {
    "red-apple": "apple",
    "automobile": "car",
    "cat-face": "cat face",
    "dog-face": "dog face",
    "pig-face": "pig face",
    "rabbit-face": "rabbit face",
    "mouse-face": "mouse face",
    "cow-face": "cow face",
    "horse-face": "horse face",
    "tiger-face": "tiger face",
    "monkey-face": "monkey face",
    "dragon-face": "dragon face",
    "tropical-fish": "tropical fish",
    "billed-cap": "cap",
    "womans-hat": "hat",
    "running-shoe": "shoe",
    "high-heeled-shoe": "high heel",
    "hiking-boot": "boot",
    "clutch-bag": "bag",
    "delivery-truck": "truck",
    "pickup-truck": "pickup truck",
    "articulated-lorry": "lorry",
    "fire-engine": "fire engine",
    "sport-utility-vehicle": "suv",
    "closed-book": "book",
    "wrapped-gift": "gift",
    "gem-stone": "gem",
    "mobile-phone": "phone",
    "locked": "lock",
    "hot-beverage": "cup",
    "beer-mug": "mug",
    "cup-with-straw": "cup with straw",
    "game-die": "die",
    "video-game": "game controller",
    "american-football": "american football",
    "soft-ice-cream": "soft ice cream",
    "lady-beetle": "ladybug",
    "baby-chick": "chick",
    "t-rex": "t-rex",
    "sauropod": "dinosaur",
    "alien-monster": "alien monster",
    "spouting-whale": "spouting whale",
    "couch-and-lamp": "couch",
    "potted-plant": "plant",
    "folding-hand-fan": "fan",
    "red-paper-lantern": "lantern",
    "red-envelope": "envelope",
    "rescue-workers-helmet": "helmet",
    "boxing-glove": "boxing glove",
    "ice-skate": "ice skate",
    "roller-skate": "roller skate",
    "pool-8-ball": "pool ball",
    "tear-off-calendar": "calendar",
    "clipboard": "clipboard",
    "file-folder": "folder",
    "pushpin": "pin",
    "maple-leaf": "leaf",
    "sewing-needle": "needle",
    "safety-vest": "vest",
    "running-shirt": "shirt",
    "kimono": "kimono",
    "coat": "coat",
    "shorts": "shorts",
    "bikini": "bikini",
    "lotus": "lotus",
    "hourglass-done": "hourglass",
    "red-triangle-pointed-down": "triangle",
}
RECOLOURED: dict[str, str] = {name: name.replace("-", " ") for name in _PLAIN} | _NAMED

_HEX = re.compile(r"#[0-9a-fA-F]{6}\b|#[0-9a-fA-F]{3}\b")
_NEUTRAL_CHROMA = 0.035  # OKLab chroma under which a fill counts as grey
_FAMILY_DEGREES = 38.0


def oklab(colour: str) -> tuple[float, float, float]:
    """'#rrggbb' or '#rgb' -> (L, a, b) of OKLab, L in 0..1."""
    digits = colour.lstrip("#")
    digits = "".join(c * 2 for c in digits) if len(digits) == 3 else digits
    channels = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    r, g, b = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    l = (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3)
    m = (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3)
    s = (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3)
    return (
        0.2104542553 * l + 0.7936177850 * m - 0.0040720468 * s,
        1.9779984951 * l - 2.4285922050 * m + 0.4505937099 * s,
        0.0259040371 * l + 0.7827717662 * m - 0.8086757660 * s,
    )


def to_hex(lightness: float, a: float, b: float) -> str:
    """(L, a, b) of OKLab -> '#rrggbb', clipped to sRGB."""
    l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    s = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
        -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
        -0.0041960863 * l - 0.7034186147 * m + 1.7076147010 * s,
    )
    channels = [min(1.0, max(0.0, c)) for c in linear]
    srgb = [12.92 * c if c <= 0.0031308 else 1.055 * c ** (1 / 2.4) - 0.055 for c in channels]
    return "#" + "".join(f"{round(c * 255):02x}" for c in srgb)


def dominant_family(areas: dict[str, float]) -> tuple[str, set[str]]:
    """Fill areas by colour -> the dominant fill and the fills of its hue family.

    An icon with under a quarter of coloured area is treated as neutral: its greys are the family.
    """
    lab = {fill: oklab(fill) for fill in areas}
    chroma = {fill: math.hypot(*lab[fill][1:]) for fill in areas}
    coloured = {f: n for f, n in areas.items() if chroma[f] >= _NEUTRAL_CHROMA}
    if sum(coloured.values()) < 0.25 * sum(areas.values()):
        greys = {f: n for f, n in areas.items() if f not in coloured}
        dominant = max(greys, key=lambda f: greys[f])
        return dominant, set(greys)

    def angle(fill: str) -> float:
        return math.degrees(math.atan2(lab[fill][2], lab[fill][1]))

    def near(one: str, other: str) -> bool:
        return abs((angle(one) - angle(other) + 180) % 360 - 180) <= _FAMILY_DEGREES

    weight = {f: sum(n for g, n in coloured.items() if near(f, g)) + n for f, n in coloured.items()}
    centre = max(weight, key=lambda f: weight[f])
    family = {f for f in coloured if near(f, centre)}
    return max(family, key=lambda f: coloured[f]), family


def recoloured(body: str, dominant: str, family: set[str], colour: str) -> str:
    """The SVG body with each fill of `family` moved to `colour`, lightness differences kept."""
    target, base = oklab(COLOURS[colour]), oklab(dominant)
    target_chroma = math.hypot(*target[1:])

    def replace(match: re.Match[str]) -> str:
        fill = match.group(0)
        if fill not in family:
            return fill
        lightness = min(0.97, max(0.12, target[0] + 0.85 * (oklab(fill)[0] - base[0])))
        # Chroma has to shrink near white and black, or the sRGB clip changes the hue.
        room = min(1.0, (1.0 - lightness) / max(1e-6, 1.0 - target[0]) * 1.1)
        scale = min(room, 1.0) if target_chroma else 0.0
        return to_hex(lightness, target[1] * scale, target[2] * scale)

    return _HEX.sub(replace, body)


def fills(body: str) -> set[str]:
    """The distinct hex colours of an SVG body."""
    return set(_HEX.findall(body))
