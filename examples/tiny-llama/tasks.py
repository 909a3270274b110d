"""The text tiny-llama is trained on: small tasks whose answers can be checked.

Every task is a function that draws one `Example` from a random generator. An
example carries its right answer, computed by the rule of the task and not by a
model, so that a completion can be called right or wrong.

The ``scale`` argument of a task, between 0 and 1, says how long the example
should be: 0 is the shortest prompt the task knows and 1 the longest.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Message = dict[str, str]

MAX_NUMBER = 999
MAX_TOLD_ITEMS = 70
MAX_ITEMS = 60
MAX_PAIRS = 40
MAX_FILLER_WORDS = 130

CYCLES: dict[str, str] = {
    "days": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "months": (
        "January February March April May June July August September October November December"
    ),
    "lower": " ".join(string.ascii_lowercase),
    "upper": " ".join(string.ascii_uppercase),
    "french_months": (
        "janvier février mars avril mai juin juillet août septembre octobre novembre décembre"
    ),
    "spanish_days": "lunes martes miércoles jueves viernes sábado domingo",
    "german_numbers": "null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf",
    "greek": "α β γ δ ε ζ η θ ι κ λ μ ν ξ ο π ρ σ τ υ φ χ ψ ω",
    "moon": "🌑 🌒 🌓 🌔 🌕 🌖 🌗 🌘",
    "clock": "🕐 🕑 🕒 🕓 🕔 🕕 🕖 🕗 🕘 🕙 🕚 🕛",
    "zodiac": "♈ ♉ ♊ ♋ ♌ ♍ ♎ ♏ ♐ ♑ ♒ ♓",
    "kana": "あ い う え お か き く け こ さ し す せ そ た ち つ て と",
}
"""Lists that start over at their end, by the name of the list."""

SYMBOLS = tuple("🍎🍌🍒🍇🍋🍓🥝🍑🐶🐱🐭🐰🦊🐻🐼🐸🐵🐔🌵🌻🍀🚗🚕🚲🚀⭐🔥💧")
ACCENTED = (
    "café",
    "señor",
    "über",
    "naïve",
    "crème",
    "piñata",
    "smörgås",
    "façade",
    "jalapeño",
    "Zürich",
)
NAMES = ("Anna", "Bob", "Carl", "Dora", "Eve", "Finn", "Gina", "Hugo", "Ivy", "Jack")
THINGS = ("apples", "pears", "plums", "figs", "nuts", "eggs", "cups", "pens", "hats", "keys")
FILLER = (
    "the",
    "and",
    "to",
    "old",
    "then",
    "by",
    "on",
    "wet",
    "in",
    "at",
    "is",
    "was",
    "of",
    "for",
)
WORDS = (
    "cat",
    "dog",
    "sun",
    "red",
    "hat",
    "pen",
    "car",
    "bus",
    "box",
    "cup",
    "map",
    "key",
    "bed",
    "net",
    "ant",
    "bee",
    "cow",
    "fox",
    "hen",
    "pig",
    "rat",
    "owl",
    "ape",
    "eel",
    "ice",
    "jam",
    "pie",
    "egg",
    "nut",
    "oil",
    "gem",
    "gum",
    "hut",
    "inn",
    "jar",
    "kit",
    "log",
    "mat",
    "oak",
    "zoo",
)
POOL = (*WORDS, *string.ascii_lowercase, *string.digits)
"""Items that are one token each when they stand behind a space."""

DIGITS_ZH = "零一二三四五六七八九"
ONES_EN = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS_EN = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


@dataclass(frozen=True)
class Example:
    """One prompt with its right answer.

    Attributes:
        task: Name of the task the example belongs to.
        prompt: Text the model is given.
        answer: Text that has to follow the prompt.
        ends: Whether the answer is over after `answer`. When false, the answer
            is the start of a text that could go on.
        messages: The conversation, for a chat example, else None. `prompt` is
            empty in that case, and the last message is the assistant's answer.
    """

    task: str
    prompt: str
    answer: str
    ends: bool
    messages: tuple[Message, ...] | None = None


Task = Callable[[random.Random, float], Example]


def chinese_number(number: int) -> str:
    """Writes a number from 1 to 99 with Chinese numerals.

    Args:
        number: The number.

    Returns:
        The numeral, such as ``二十三`` for 23.
    """
    tens, ones = divmod(number, 10)
    head = "" if tens == 0 else "十" if tens == 1 else DIGITS_ZH[tens] + "十"
    return head + (DIGITS_ZH[ones] if ones else "")


def english_number(number: int) -> str:
    """Writes a number from 0 to 99 in English words.

    Args:
        number: The number.

    Returns:
        The words, joined by a hyphen where there are two.
    """
    if number < len(ONES_EN):
        return ONES_EN[number]
    tens, ones = divmod(number, 10)
    return TENS_EN[tens - 2] + (f"-{ONES_EN[ones]}" if ones else "")


def _between(rng: random.Random, low: int, high: int, scale: float) -> int:
    """Draws a length around the point that `scale` marks between two limits."""
    point = low + (high - low) * scale
    return max(low, min(high, round(rng.uniform(0.75, 1.25) * point)))


def _item(rng: random.Random) -> str:
    """Draws an item such as ``k7``."""
    return rng.choice(string.ascii_lowercase) + rng.choice(string.digits)


def _items(rng: random.Random, count: int) -> list[str]:
    """Draws different items, such as ``k7``, or words, letters and digits."""
    if count <= len(string.digits) and rng.random() < 0.5:
        letters = rng.sample(string.ascii_lowercase, count)
        digits = rng.sample(string.digits, count)
        return [letter + digit for letter, digit in zip(letters, digits, strict=True)]
    return rng.sample(POOL, count)


def _series(
    rng: random.Random, task: str, items: Sequence[str], shown: int, ends: bool = False
) -> Example:
    """Shows the start of a list and asks for the rest of it."""
    told = items[shown:]
    if len(told) > MAX_TOLD_ITEMS:
        ends = False
    length = len(told) if ends else rng.randint(1, min(len(told), MAX_TOLD_ITEMS))
    return Example(
        task,
        " ".join(items[:shown]),
        "".join(f" {item}" for item in told[:length]),
        ends,
    )


def _cycle(name: str) -> Task:
    """Makes the task of going on with one of the lists in `CYCLES`."""
    items = CYCLES[name].split()

    def task(rng: random.Random, scale: float) -> Example:
        shown = _between(rng, 2, 40, scale)
        start = rng.randrange(len(items))
        turns = [items[(start + index) % len(items)] for index in range(shown + 40)]
        return _series(rng, name, turns, shown)

    return task


def _count(step: int) -> Task:
    """Makes the task of counting by a step, which may be negative."""
    name = f"count_by_{step}" if step > 0 else f"count_down_{-step}"

    def task(rng: random.Random, scale: float) -> Example:
        shown = rng.randint(3, 6) if rng.random() < 0.35 else _between(rng, 3, 70, scale)
        size = abs(step)
        total = min(shown + MAX_TOLD_ITEMS, MAX_NUMBER // size + 1)
        if rng.random() < 0.3:
            total = min(total, shown + rng.randint(2, 30))
        room = MAX_NUMBER - (total - 1) * size
        # Small starts are what people type, so they are drawn more often.
        low = rng.randint(0, min(room, 30) if rng.random() < 0.4 else room)
        if size > 1 and rng.random() < 0.7:
            low -= low % size
        if step < 0 and rng.random() < 0.5:
            low = low % size
        numbers = [low + index * size for index in range(total)]
        if step < 0:
            numbers.reverse()
        items = [str(number) for number in numbers]
        return _series(rng, name, items, shown, ends=step < 0 and low < size)

    return task


def english_words(rng: random.Random, scale: float) -> Example:
    """Counts in English words."""
    shown = _between(rng, 2, 30, scale)
    start = rng.randint(0, min(99 - shown, 20 if rng.random() < 0.4 else 99))
    items = [english_number(number) for number in range(start, 100)]
    return _series(rng, "english_words", items[: shown + 30], shown)


def chinese_words(rng: random.Random, scale: float) -> Example:
    """Counts in Chinese numerals."""
    shown = _between(rng, 2, 30, scale)
    start = rng.randint(1, min(99 - shown, 10 if rng.random() < 0.4 else 99))
    items = [chinese_number(number) for number in range(start, 100)]
    return _series(rng, "chinese_words", items[: shown + 30], shown)


def count_between(rng: random.Random, scale: float) -> Example:
    """Counts between two numbers that the prompt names, then stops."""
    length = _between(rng, 1, 40, scale)
    low = rng.randint(0, 99 - length)
    numbers = list(range(low, low + length + 1))
    if rng.random() < 0.3:
        numbers.reverse()
        prompt = f"count {numbers[0]} down to {numbers[-1]}:"
    else:
        prompt = f"count {numbers[0]} to {numbers[-1]}:"
    return Example("count_between", prompt, "".join(f" {number}" for number in numbers), True)


def add(rng: random.Random, _scale: float) -> Example:
    """Adds two numbers."""
    high = 9 if rng.random() < 0.3 else 20
    left, right = rng.randint(0, high), rng.randint(0, high)
    return Example("add", f"{left} + {right} =", f" {left + right}", True)


def subtract(rng: random.Random, _scale: float) -> Example:
    """Subtracts a number from one that is not smaller."""
    high = 9 if rng.random() < 0.3 else 20
    right, left = sorted((rng.randint(0, high), rng.randint(0, high)))
    return Example("subtract", f"{left} - {right} =", f" {left - right}", True)


def copy(rng: random.Random, scale: float) -> Example:
    """Repeats a list of items."""
    items = " ".join(_items(rng, _between(rng, 1, MAX_ITEMS, scale)))
    return Example("copy", f"copy: {items} ->", f" {items}", True)


def copy_symbols(rng: random.Random, scale: float) -> Example:
    """Repeats emoji and accented words."""
    pool = SYMBOLS if rng.random() < 0.7 else SYMBOLS + ACCENTED
    items = " ".join(rng.sample(pool, _between(rng, 1, 10, scale)))
    return Example("copy_symbols", f"copy: {items} ->", f" {items}", True)


def reverse(rng: random.Random, scale: float) -> Example:
    """Writes items from the last to the first."""
    items = rng.sample(POOL, _between(rng, 2, 40, scale))
    prompt = f"reverse: {' '.join(items)} ->"
    return Example("reverse", prompt, "".join(f" {item}" for item in items[::-1]), True)


def capitals(rng: random.Random, scale: float) -> Example:
    """Writes letters as capitals."""
    letters = rng.sample(string.ascii_lowercase, _between(rng, 1, 26, scale))
    prompt = f"upper: {' '.join(letters)} ->"
    return Example("capitals", prompt, "".join(f" {letter.upper()}" for letter in letters), True)


def repeat(rng: random.Random, _scale: float) -> Example:
    """Writes an item as many times as the prompt says."""
    item, times = rng.choice((_item(rng), rng.choice(WORDS))), rng.randint(2, 9)
    return Example("repeat", f"repeat {times}: {item} ->", f" {item}" * times, True)


def _list(rng: random.Random, scale: float) -> list[str]:
    """Draws a list that is long enough to have every item many times."""
    length = _between(rng, 2, 220, scale)
    return _items(rng, length) if length <= MAX_ITEMS else rng.choices(POOL, k=length)


def first_of(rng: random.Random, scale: float) -> Example:
    """Tells the first item of a list."""
    items = _list(rng, scale)
    return Example("first_of", f"first of: {' '.join(items)} ->", f" {items[0]}", True)


def last_of(rng: random.Random, scale: float) -> Example:
    """Tells the last item of a list."""
    items = _list(rng, scale)
    return Example("last_of", f"last of: {' '.join(items)} ->", f" {items[-1]}", True)


def after(rng: random.Random, scale: float) -> Example:
    """Tells which item stands behind another one in a list."""
    items = rng.sample(POOL, _between(rng, 3, MAX_ITEMS, scale))
    index = rng.randrange(len(items) - 1)
    prompt = f"list: {' '.join(items)} ; after {items[index]}"
    return Example("after", prompt, f" {items[index + 1]}", True)


def before(rng: random.Random, scale: float) -> Example:
    """Tells which item stands in front of another one in a list."""
    items = rng.sample(POOL, _between(rng, 3, MAX_ITEMS, scale))
    index = rng.randrange(1, len(items))
    prompt = f"list: {' '.join(items)} ; before {items[index]}"
    return Example("before", prompt, f" {items[index - 1]}", True)


def lookup(rng: random.Random, scale: float) -> Example:
    """Tells the value of one of the keys in a list of pairs."""
    keys = rng.sample(WORDS, _between(rng, 2, MAX_PAIRS, scale))
    values = string.ascii_lowercase + string.digits
    pairs = {key: rng.choice(values) for key in keys}
    key = rng.choice(keys)
    listed = " , ".join(f"{name} {value}" for name, value in pairs.items())
    return Example("lookup", f"pairs: {listed} ; {key}", f" {pairs[key]}", True)


def remember(rng: random.Random, scale: float) -> Example:
    """Recalls items that stood in front of a long text."""
    items = " ".join(_items(rng, rng.randint(1, 8)))
    words = " ".join(rng.choice(FILLER) for _ in range(_between(rng, 2, MAX_FILLER_WORDS, scale)))
    return Example("remember", f"remember {items} . {words} . recall:", f" {items}", True)


def owners(rng: random.Random, scale: float) -> Example:
    """Recalls who has how many of what."""
    names = rng.sample(NAMES, _between(rng, 2, len(NAMES), scale))
    owned = {name: f"{rng.randint(2, 9)} {rng.choice(THINGS)}" for name in names}
    name = rng.choice(names)
    told = " ".join(f"{owner} has {thing}." for owner, thing in owned.items())
    return Example("owners", f"{told} So {name} has", f" {owned[name]}.", True)


PLAIN_TASKS: dict[str, tuple[Task, float]] = {
    "count_by_1": (_count(1), 1.0),
    "count_by_2": (_count(2), 0.8),
    "count_by_5": (_count(5), 0.5),
    "count_by_10": (_count(10), 0.4),
    "count_down_1": (_count(-1), 0.8),
    **{name: (_cycle(name), 0.16) for name in CYCLES},
    "english_words": (english_words, 0.3),
    "chinese_words": (chinese_words, 0.3),
    "count_between": (count_between, 2.0),
    "add": (add, 2.5),
    "subtract": (subtract, 2.5),
    "copy": (copy, 4.0),
    "copy_symbols": (copy_symbols, 1.5),
    "reverse": (reverse, 2.5),
    "capitals": (capitals, 1.2),
    "repeat": (repeat, 1.0),
    "first_of": (first_of, 1.0),
    "last_of": (last_of, 0.8),
    "after": (after, 1.0),
    "before": (before, 1.5),
    "lookup": (lookup, 1.5),
    "remember": (remember, 2.0),
    "owners": (owners, 1.5),
}
"""The tasks that are put as plain text, each with its share of the training text."""

CHAT_ASKED: tuple[Task, ...] = (
    add,
    add,
    subtract,
    count_between,
    copy,
    copy_symbols,
    reverse,
    capitals,
    repeat,
    first_of,
    last_of,
)
CHAT_TASKS = ("chat", "chat_memory")
CHAT_SHARE = 5.0
SYSTEM_PROMPTS = ("You are tiny.", "Answer briefly.", "Be exact.")


def _say(role: str, content: str) -> Message:
    """Makes one message of a conversation."""
    return {"role": role, "content": content}


def chat(rng: random.Random, scale: float) -> Example:
    """Asks for the answer of a plain task, in the last turn of a conversation."""
    turns = rng.choice((1, 1, 1, 1, 2, 3))
    messages = [_say("system", rng.choice(SYSTEM_PROMPTS))] if rng.random() < 0.2 else []
    for _ in range(turns):
        example = rng.choice(CHAT_ASKED)(rng, scale / turns * 0.7)
        messages.append(_say("user", example.prompt))
        messages.append(_say("assistant", example.answer.strip()))
    return Example("chat", "", f" {messages[-1]['content']}", True, tuple(messages))


def chat_memory(rng: random.Random, scale: float) -> Example:
    """Asks for something that the user said in an earlier turn."""
    name, code = rng.choice(NAMES), _item(rng)
    messages = [_say("system", rng.choice(SYSTEM_PROMPTS))] if rng.random() < 0.2 else []
    messages.append(_say("user", f"I am {name}. My code is {code}."))
    messages.append(_say("assistant", f"Hello {name}!"))
    for _ in range(round(scale * 3)):
        example = rng.choice((add, subtract, repeat))(rng, scale)
        messages.append(_say("user", example.prompt))
        messages.append(_say("assistant", example.answer.strip()))
    question, answer = rng.choice(
        (
            ("Who am I?", f"You are {name}."),
            ("What is my code?", f"Your code is {code}."),
            ("Who am I and what is my code?", f"You are {name}. Your code is {code}."),
        )
    )
    messages.append(_say("user", question))
    messages.append(_say("assistant", answer))
    return Example("chat_memory", "", f" {answer}", True, tuple(messages))


TASKS: dict[str, tuple[Task, float]] = {
    **PLAIN_TASKS,
    "chat": (chat, CHAT_SHARE * 0.75),
    "chat_memory": (chat_memory, CHAT_SHARE * 0.25),
}
"""All tasks, each with its share of the training text."""
