"""Conversations and stories that this project makes up, for training a small language model. Licence: Apache-2.0.

Every document is drawn from a seeded generator, so the text is the same on every machine. The answers are true: sums
are computed, and questions about a passage are answered from the passage.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator


USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"

NAMES = (
    "Anna Ben Carla David Elena Farid Greta Hugo Ines Jonas Karim Lena Mara Nils Olga Pavel Rosa Samir Tara Ugo Vera "
    "Walid Yara Zoe Amir Bianca Clara Dario Emma Felix"
).split()
COLORS = "red blue green yellow white black purple orange brown grey pink silver golden".split()
OBJECTS = (
    "key lamp book cup coin map ring bell rope drum hat box clock letter shell stone basket mirror flute kite bottle "
    "candle feather spoon blanket compass"
).split()
PLACES = (
    "the kitchen,the garden,the library,the old tower,the market,the harbour,the forest,the school,the attic,the mill,"
    "the cellar,the bakery,the station,the valley,the island,the bridge"
).split(",")
SPOTS = (
    "on the table,under the bed,behind the door,in the drawer,on the shelf,in the box,by the window,under the chair"
).split(",")
FEELINGS = "happy proud tired curious brave calm surprised worried lonely cheerful".split()
TRAITS = "small old clever shy brave kind lazy quick gentle hungry patient noisy".split()
WEATHER = "sunny rainy windy foggy snowy cold warm stormy".split()
ANIMALS = {  # sound, young, home, legs, food
    "dog": ("barks", "puppy", "a kennel", 4, "meat"),
    "cat": ("meows", "kitten", "a house", 4, "fish"),
    "cow": ("moos", "calf", "a barn", 4, "grass"),
    "horse": ("neighs", "foal", "a stable", 4, "hay"),
    "sheep": ("bleats", "lamb", "a meadow", 4, "grass"),
    "pig": ("grunts", "piglet", "a sty", 4, "corn"),
    "duck": ("quacks", "duckling", "a pond", 2, "seeds"),
    "owl": ("hoots", "owlet", "a hollow tree", 2, "mice"),
    "frog": ("croaks", "tadpole", "a pond", 4, "flies"),
    "bee": ("buzzes", "larva", "a hive", 6, "nectar"),
    "lion": ("roars", "cub", "the savanna", 4, "meat"),
    "wolf": ("howls", "pup", "a den", 4, "meat"),
    "mouse": ("squeaks", "pup", "a small hole", 4, "cheese"),
    "goat": ("bleats", "kid", "the mountains", 4, "leaves"),
    "hen": ("clucks", "chick", "a coop", 2, "corn"),
    "bear": ("growls", "cub", "a cave", 4, "honey"),
}
CAPITALS = dict(
    pair.split(":")
    for pair in (
        "France:Paris,Spain:Madrid,Italy:Rome,Germany:Berlin,Poland:Warsaw,Austria:Vienna,Portugal:Lisbon,Greece:Athens,"
        "Norway:Oslo,Sweden:Stockholm,Finland:Helsinki,Ireland:Dublin,Hungary:Budapest,Japan:Tokyo,China:Beijing,"
        "Egypt:Cairo,Kenya:Nairobi,Canada:Ottawa,Peru:Lima,Chile:Santiago,Cuba:Havana,Belgium:Brussels,Russia:Moscow,"
        "Turkey:Ankara,Denmark:Copenhagen,Thailand:Bangkok"
    ).split(",")
)
OPPOSITES = (
    "big small,hot cold,fast slow,early late,light dark,old new,high low,open closed,full empty,wet dry,hard soft,"
    "loud quiet,happy sad,strong weak,near far,rich poor,thick thin,long short"
).split(",")
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()

Exchange = tuple[str, str]


def dialogues(seed: int, count: int) -> Iterator[str]:
    """Yield `count` documents: conversations of one to six exchanges, and long passages with questions about them."""
    draw = random.Random(seed)
    for _ in range(count):
        kind = draw.random()
        if kind < 0.30:
            exchanges = [story(draw)]
        elif kind < 0.55:
            exchanges = passage(draw)
        else:
            exchanges = [exchange for _ in range(draw.randint(1, 6)) for exchange in draw.choice(SMALL_TALK)(draw)]
        yield conversation(exchanges)


def conversation(exchanges: list[Exchange]) -> str:
    """The exchanges as the tokenizer's chat template writes them."""
    return "".join(f"{USER}{question}{ASSISTANT}{answer}{END}" for question, answer in exchanges)


def number_words(number: int) -> str:
    """0 to 999 in English words."""
    if number >= 100:
        rest = f" and {number_words(number % 100)}" if number % 100 else ""
        return f"{ONES[number // 100]} hundred{rest}"
    if number < 20:
        return ONES[number]
    return TENS[number // 10] + (f"-{ONES[number % 10]}" if number % 10 else "")


def article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def story(draw: random.Random) -> Exchange:
    """A story whose hero, wish, place and helper stay the same from the first sentence to the last."""
    hero, helper = draw.sample(sorted(ANIMALS), 2)
    name, friend = draw.sample(NAMES, 2)
    trait, other = draw.sample(TRAITS, 2)
    color, thing = draw.choice(COLORS), draw.choice(OBJECTS)
    home, far = draw.sample(PLACES, 2)
    spot, weather, feeling = draw.choice(SPOTS), draw.choice(WEATHER), draw.choice(FEELINGS)
    food = ANIMALS[hero][4]
    opening = draw.choice(
        (
            f"Once upon a time there was {article(trait)} {hero} called {name}, who lived near {home}.",
            f"{name} was {article(trait)} {hero}. Every day {name} walked around {home}.",
            f"Long ago, near {home}, lived {article(trait)} {hero}. Its name was {name}.",
        )
    )
    wish = draw.choice(
        (
            f"More than anything, {name} wanted to find the {color} {thing}.",
            f"One {weather} morning {name} noticed that the {color} {thing} was gone.",
            f"One day {name} heard about {article(color)} {thing} that was hidden near {far}.",
        )
    )
    trouble = draw.choice(
        (
            f"{name} looked everywhere, but the {thing} was not there. The day was {weather} and {name} grew hungry.",
            f"The way to {far} was long and {weather}, and {name} had only a little {food} to eat.",
            f"{name} asked everyone near {home}, but nobody had seen the {thing}.",
        )
    )
    help_came = draw.choice(
        (
            f'Then {article(other)} {helper} called {friend} came along. "I know where the {thing} is," said '
            f'{friend}. "It is {spot}, near {far}."',
            f'Near {far}, {name} met {article(other)} {helper}. "My name is {friend}," said the {helper}. '
            f'"Share your {food} with me, and I will help you find the {color} {thing}."',
            f'"Why do you look so sad?" asked {friend}, {article(other)} {helper}. {name} told {friend} about the '
            f"{color} {thing}, and they went to {far} together.",
        )
    )
    ending = draw.choice(
        (
            f"They found the {thing} {spot}. {name} was {feeling} and thanked {friend}. From that day on, the {hero} "
            f"and the {helper} were friends.",
            f"And there it was, {spot}: the {color} {thing}! {name} felt {feeling}, and gave {friend} half of the "
            f"{food}.",
            f"In the evening they came back to {home} with the {color} {thing}. {name} and {friend} were both "
            f"{feeling}.",
        )
    )
    ask = draw.choice(
        (
            f"Tell me a story about {article(hero)} and {article(thing)}.",
            f"Please write a short story about {name}, {article(trait)} {hero}.",
            f"Can you tell me a story with {article(hero)} and {article(helper)}?",
        )
    )
    return ask, " ".join((opening, wish, trouble, help_came, ending))


def passage(draw: random.Random) -> list[Exchange]:
    """Facts about several people, then questions whose answers are somewhere in those facts."""
    people = draw.sample(NAMES, draw.randint(3, 14))
    facts = {p: (draw.choice(COLORS), draw.choice(OBJECTS), draw.choice(PLACES), draw.randint(2, 99)) for p in people}
    lines = []
    for person, (color, thing, place, age) in facts.items():
        sentences = [
            f"{person} has {article(color)} {thing}.",
            f"{person} lives near {place}.",
            f"{person} is {age} years old.",
        ]
        lines.append(" ".join(sentences[: draw.randint(1, 3)]))
    told = " ".join(lines)
    questions = []
    for person in draw.sample(people, min(len(people), draw.randint(1, 5))):
        color, thing, place, age = facts[person]
        options = [
            (f"What does {person} have?", f"{person} has {article(color)} {thing}."),
            (f"What colour is the {thing} of {person}?", f"The {thing} of {person} is {color}."),
        ]
        if f"{person} lives" in told:
            options.append((f"Where does {person} live?", f"{person} lives near {place}."))
        if f"{person} is" in told:
            options.append((f"How old is {person}?", f"{person} is {age} years old."))
        questions.append(draw.choice(options))
    first, answer = questions[0]
    return [(f"{told} {first}", answer), *questions[1:]]


def arithmetic(draw: random.Random) -> Iterator[Exchange]:
    kind, a, b = draw.randrange(4), draw.randint(0, 50), draw.randint(0, 50)
    if kind == 0:
        yield f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}."
    elif kind == 1:
        yield f"What is {a + b} minus {b}?", f"{a + b} minus {b} is {a}."
    elif kind == 2:
        a, b = draw.randint(0, 12), draw.randint(0, 12)
        yield f"What is {a} times {b}?", f"{a} times {b} is {a * b}."
    elif a != b:
        yield f"Which is larger, {a} or {b}?", f"{max(a, b)} is larger than {min(a, b)}."


def animals(draw: random.Random) -> Iterator[Exchange]:
    animal = draw.choice(sorted(ANIMALS))
    sound, young, home, legs, food = ANIMALS[animal]
    yield draw.choice(
        (
            (f"What sound does {article(animal)} make?", f"{article(animal).capitalize()} {sound}."),
            (f"What is a young {animal} called?", f"A young {animal} is called {article(young)}."),
            (f"Where does {article(animal)} live?", f"{article(animal).capitalize()} lives in {home}."),
            (f"How many legs does {article(animal)} have?", f"{article(animal).capitalize()} has {ONES[legs]} legs."),
            (f"What does {article(animal)} eat?", f"{article(animal).capitalize()} eats {food}."),
        )
    )


def facts(draw: random.Random) -> Iterator[Exchange]:
    country = draw.choice(sorted(CAPITALS))
    word, opposite = draw.choice(OPPOSITES).split()[:: draw.choice((1, -1))]
    day, month = draw.randrange(7), draw.randrange(12)
    number = draw.randint(0, 999)
    yield draw.choice(
        (
            (f"What is the capital of {country}?", f"The capital of {country} is {CAPITALS[country]}."),
            (
                f"Which country has the capital {CAPITALS[country]}?",
                f"{CAPITALS[country]} is the capital of {country}.",
            ),
            (f"What is the opposite of {word}?", f"The opposite of {word} is {opposite}."),
            (f"Which day comes after {DAYS[day]}?", f"{DAYS[(day + 1) % 7]} comes after {DAYS[day]}."),
            (f"Which month comes before {MONTHS[month]}?", f"{MONTHS[month - 1]} comes before {MONTHS[month]}."),
            (f"Write {number} in words.", f"{number} is {number_words(number)}."),
        )
    )


def words(draw: random.Random) -> Iterator[Exchange]:
    some = draw.sample(OBJECTS, draw.randint(3, 6))
    listed = ", ".join(some)
    yield draw.choice(
        (
            (f"Sort these words: {listed}.", f"Sorted: {', '.join(sorted(some))}."),
            (f"Repeat these words: {listed}.", f"{listed.capitalize()}."),
            (f"Reverse the order: {listed}.", f"Reversed: {', '.join(reversed(some))}."),
            (f"How many words are these: {listed}?", f"These are {ONES[len(some)]} words."),
            (f"Which word comes first: {listed}?", f"The first word is {some[0]}."),
            (f"Spell the word {some[0]}.", f"{some[0].capitalize()} is spelled {'-'.join(some[0])}."),
        )
    )


def manners(draw: random.Random) -> Iterator[Exchange]:
    name, feeling = draw.choice(NAMES), draw.choice(FEELINGS)
    yield draw.choice(
        (
            ("Hello!", "Hello! How can I help you?"),
            (f"Hello, my name is {name}.", f"Nice to meet you, {name}! What would you like to know?"),
            (
                "Who are you?",
                "I am a very small language model. I can count, answer small questions and tell stories.",
            ),
            ("What can you do?", "I can tell stories, add numbers, and answer questions about animals and Python."),
            (f"I feel {feeling} today.", f"Thank you for telling me that you feel {feeling}."),
            ("Thank you.", "You are welcome!"),
            ("Goodbye.", "Goodbye! Come back soon."),
        )
    )


SMALL_TALK: tuple[Callable[[random.Random], Iterator[Exchange]], ...] = (
    arithmetic, arithmetic, animals, facts, facts, words, manners,
)  # fmt: skip
