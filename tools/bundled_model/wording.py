"""Captions: the names of an icon, and the many ways in which a person asks for it."""

import random
import re

from synonyms import CANONICAL, synonym_table

_PEOPLE = {"man": "male", "woman": "female", "person": ""}
_LOOKS = {
    "bald": "bald {p}",
    "beard": "{p} with a beard",
    "deaf": "deaf {p}",
    "red-hair": "{p} with red hair",
    "white-hair": "{p} with white hair",
    "blonde-hair": "{p} with blonde hair",
    "curly-hair": "{p} with curly hair",
}
_CLOCK = dict(
    zip(
        "one two three four five six seven eight nine ten eleven twelve".split(),
        range(1, 13),
        strict=True,
    )
)
COLOUR_WORDS = "red orange yellow green blue purple pink brown black grey white".split()

_PREFIXES = [
    "please show me", "show me", "i want", "can you draw", "could you make", "draw me", "draw",
    "a picture of", "picture of", "an image of", "image of", "an icon of", "icon of",
    "a drawing of", "an emoji of", "generate", "create", "please draw", "give me", "i would like",
    "let me see", "make me", "paint", "an illustration of", "a flat icon of", "just", "here is",
    "imagine", "a photo of", "clip art of", "render", "a render of", "a sticker of", "a logo of",
    "make", "please make", "can i have", "i need", "a cartoon of", "what does it look like:",
    "hey, draw", "could you please draw", "would you show me", "can you show me",
    "generate an image of", "create a picture of", "i'd like to see", "a simple drawing of",
    "a cute", "a nice", "a little", "a beautiful", "a simple", "one", "the", "my", "look, ",
    "hi, i want", "i want to see", "please generate", "we need", "design", "a close-up of",
    "emoji of", "symbol of", "sketch of",
]  # fmt: skip
_SUFFIXES = [
    "please", "emoji", "icon", "on a white background", "!", "!!", "!!!", "?", ".", "...", " :)",
    "for me", "now", "thanks", "thank you", "in flat style", "flat design", "on white", "picture",
    "image", "drawing", ", please", "as an emoji", "as an icon", "for my website", "illustration",
    "for my presentation", "clipart", "sticker", "please!", ", thanks!", "symbol", ", flat icon",
    ", simple, flat colors", ", vector art", ", highly detailed", ", 4k", ", digital art",
    ", minimal", ", best quality", ", colorful", ", trending design", ", no text", ", centered",
    ", clean lines", "for a logo", "right now", "??", "!?", "cartoon",
]  # fmt: skip
# Words that name no icon, for filler that no template foresees.
_FILLER = (
    "hello hi hey there dear so well ok now today quick quickly please kindly maybe could would "
    "can you we i me my our your us show see want wanted need get paint make made draw put have "
    "having some nice good great lovely pretty cool new of for with to in on at the this that "
    "one another daughter son mother father friend boss teacher kids team wall really very much "
    "again too then thanks cheers mate everyone anyone small big kind sort just only also here "
    "what how if when it is was be been do does did and or but from by as an any more most "
    "other love like think know "
).split()
_BACKGROUND_TEMPLATES = [
    "{p} on a {c} background", "{p} with a {c} background", "{p}, {c} background",
    "{p} on {c}", "{p} in front of a {c} background",
]  # fmt: skip
_PAIR_TEMPLATES = [
    "{a} and {b}", "{a} and {b}", "{a} next to {b}", "{a} beside {b}", "{a} with {b}", "{a}, {b}",
]  # fmt: skip
_MASS = set("milk coffee tea beer wine honey money mail music corn pasta rain love bread".split())


def names_of(icon: str) -> list[str]:
    """Icon id -> its names without synonyms, the canonical one first."""
    if icon in CANONICAL:
        return [CANONICAL[icon]]
    first, _, rest = icon.partition("-")
    if first in _PEOPLE and rest:
        return _person_names(first, rest)
    if match := re.fullmatch(r"(\w+)-oclock", icon):
        hour = match.group(1)
        return [f"{hour} o'clock", f"{_CLOCK[hour]} o'clock", f"clock showing {hour}"]
    if match := re.fullmatch(r"(\w+)-thirty", icon):
        hour = match.group(1)
        return [f"{hour} thirty", f"half past {hour}", f"{_CLOCK[hour]}:30"]
    return [icon.replace("-", " ")]


def _person_names(who: str, rest: str) -> list[str]:
    if rest in _LOOKS:
        return [_LOOKS[rest].format(p=who)]
    words = rest.replace("-", " ")
    head = rest.split("-")[0]
    if rest.startswith(("in-", "with-")) or head.endswith("ing"):
        extra = [f"{words} {who}"] if head.endswith("ing") and "-" not in rest else []
        return [f"{who} {words}", *extra]
    return [f"{who} {words}"] + ([f"{_PEOPLE[who]} {words}"] if _PEOPLE[who] else [])


def all_names(icons: list[str]) -> dict[str, list[str]]:
    """Ids -> names with synonyms; raises ValueError when two ids claim one name."""
    table = synonym_table()
    names = {icon: names_of(icon) for icon in icons}
    canonical = {values[0] for values in names.values()}
    owner: dict[str, str] = {name: icon for icon, values in names.items() for name in values}
    for icon, extra in table.items():
        if icon not in names:
            continue
        for name in extra:
            if name in canonical and owner[name] != icon:
                raise ValueError(f"synonym {name!r} of {icon!r} is the name of {owner[name]!r}")
            if owner.setdefault(name, icon) != icon:
                raise ValueError(f"synonym {name!r} of {icon!r} belongs to {owner[name]!r} as well")
            if name not in names[icon]:
                names[icon].append(name)
    return names


def with_article(name: str, rng: random.Random) -> str:
    """'apple' -> 'an apple', 'the apple' or 'apple'; plurals get 'some' or nothing."""
    roll = rng.random()
    plural = (name.endswith("s") and not name.endswith("ss")) or name in _MASS
    if plural:
        return f"some {name}" if roll < 0.15 else f"the {name}" if roll < 0.22 else name
    if roll < 0.70:
        return f"{'an' if name[:1] in 'aeiou' else 'a'} {name}"
    return f"the {name}" if roll < 0.76 else name


def _typo(text: str, rng: random.Random) -> str:
    spots = [i for i in range(1, len(text) - 1) if text[i].isalpha() and text[i + 1].isalpha()]
    if not spots:
        return text
    i, kind = rng.choice(spots), rng.randrange(4)
    if kind == 0:
        return text[:i] + text[i + 1] + text[i] + text[i + 2 :]
    if kind == 1:
        return text[:i] + text[i + 1 :]
    if kind == 2:
        return text[:i] + text[i] + text[i:]
    return text[:i] + rng.choice("abcdefghijklmnopqrstuvwxyz") + text[i + 1 :]


def _dress(phrase: str, bare: str, rng: random.Random) -> str:
    """Filler words before and after, punctuation and case."""
    text = phrase
    if rng.random() < 0.55:
        prefix = rng.choice(_PREFIXES)
        ends_open = prefix.split()[-1] in ("cute", "nice", "little", "beautiful", "simple", "one")
        text = f"{prefix} {bare if ends_open or prefix in ('the', 'my') else phrase}"
    if rng.random() < 0.40:
        suffix = rng.choice(_SUFFIXES)
        text = f"{text}{'' if suffix[0] in '!?.,' else ' '}{suffix}"
        while rng.random() < 0.18:
            text += rng.choice([s for s in _SUFFIXES if s[0] == ","])
    return _case(_babble(text, rng), rng)


def _babble(text: str, rng: random.Random) -> str:
    """Now and then, random filler words around the request."""
    if rng.random() < 0.25:
        words = " ".join(rng.choice(_FILLER) for _ in range(rng.randint(1, 4)))
        text = f"{words}{rng.choice(['', '', ',', ':', '.'])} {text}"
    if rng.random() < 0.20:
        words = " ".join(rng.choice(_FILLER) for _ in range(rng.randint(1, 4)))
        text = f"{text}{rng.choice(['', '', ',', '.'])} {words}{rng.choice(['', '', '!', ' :)'])}"
    return text


def _case(text: str, rng: random.Random) -> str:
    roll = rng.random()
    if roll < 0.72:
        return text
    if roll < 0.84:
        return text[:1].upper() + text[1:]
    return text.title() if roll < 0.92 else text.upper()


def caption(names: list[str], colour: str | None, rng: random.Random) -> str:
    """One way to ask for an object; `colour` goes before the name when given."""
    name = names[0] if rng.random() < 0.62 or len(names) == 1 else rng.choice(names[1:])
    if colour:
        name = f"{colour} {name}"
    if rng.random() < 0.05 and len(name) > 4:
        name = _typo(name, rng)
    elif rng.random() < 0.02:
        name = name.replace(" ", rng.choice("-_"))
    roll = rng.random()
    if roll < 0.18:
        return name
    phrase = with_article(name, rng)
    return phrase if roll < 0.36 else _dress(phrase, name, rng)


def background_caption(
    names: list[str], colour: str | None, background: str, rng: random.Random
) -> str:
    """One way to ask for an object on a background colour."""
    name = names[0] if rng.random() < 0.6 else rng.choice(names)
    phrase = with_article(f"{colour} {name}" if colour else name, rng)
    text = rng.choice(_BACKGROUND_TEMPLATES).format(p=phrase, c=background)
    if rng.random() < 0.35:
        text = f"{rng.choice(_PREFIXES[:24])} {text}"
    if rng.random() < 0.15:
        text += rng.choice(["!", ".", " please", " emoji"])
    return _case(text, rng)


def pair_caption(left: str, right: str, rng: random.Random) -> str:
    """One way to ask for two objects side by side, the left one first."""
    a, b = with_article(left, rng), with_article(right, rng)
    text = rng.choice(_PAIR_TEMPLATES).format(a=a, b=b)
    if rng.random() < 0.35:
        text = f"{rng.choice(_PREFIXES[:24])} {text}"
    if rng.random() < 0.15:
        text += rng.choice(["!", ".", " please", " emoji"])
    return _case(text, rng)
