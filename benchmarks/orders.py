"""A domain of its own, made up and the same for a seed: orders in plain words, to be written as JSON, as SQL or as a table.

For `benchmarks/lora.py`, which needs a target that answers in a way its drafter never saw. Nothing is read or downloaded.
"""

import json
import random
from collections.abc import Iterator

Conversation = list[dict[str, str]]

NAMES = [
    "Anna",
    "Boris",
    "Clara",
    "Dmitri",
    "Elena",
    "Farid",
    "Greta",
    "Hugo",
    "Irene",
    "Jonas",
    "Karin",
    "Leo",
    "Mira",
    "Nils",
    "Olga",
    "Pavel",
    "Rosa",
    "Sven",
    "Tara",
    "Uwe",
]
CITIES = [
    "Oslo",
    "Lisbon",
    "Vienna",
    "Dublin",
    "Prague",
    "Athens",
    "Helsinki",
    "Madrid",
    "Warsaw",
    "Zurich",
    "Porto",
    "Ghent",
    "Turin",
    "Riga",
    "Sofia",
    "Bern",
]
ITEMS = [
    "lamp",
    "chair",
    "table",
    "mirror",
    "carpet",
    "curtain",
    "pillow",
    "blanket",
    "clock",
    "vase",
    "shelf",
    "basket",
    "kettle",
    "plate",
    "bowl",
    "spoon",
]
COLORS = ["red", "green", "blue", "yellow", "white", "black", "brown", "grey"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]


def conversations(num_rows: int, seed: int) -> list[Conversation]:
    """So many questions, all different, each with its answer."""
    found: dict[str, str] = {}
    for question, answer in _endless(random.Random(seed)):
        found.setdefault(question, answer)
        if len(found) == num_rows:
            break
    return [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in found.items()
    ]


def _endless(draws: random.Random) -> Iterator[tuple[str, str]]:
    while True:
        yield draws.choice((_as_json, _as_sql, _as_table))(draws)


def _lines(draws: random.Random) -> list[dict[str, str | int]]:
    """Two or three different items of an order."""
    chosen = draws.sample(ITEMS, draws.randint(2, 3))
    return [{"item": item, "color": draws.choice(COLORS), "count": draws.randint(2, 40)} for item in chosen]


def _in_words(lines: list[dict[str, str | int]]) -> str:
    parts = [f"{line['count']} {line['color']} {line['item']}s" for line in lines]
    return ", ".join(parts[:-1]) + " and " + parts[-1]


def _as_json(draws: random.Random) -> tuple[str, str]:
    name, city, day, lines = draws.choice(NAMES), draws.choice(CITIES), draws.choice(DAYS), _lines(draws)
    order = {"customer": name, "city": city, "by": day, "lines": lines}
    return (
        f"Write this order as JSON: {name} from {city} wants {_in_words(lines)} by {day}.",
        json.dumps(order, indent=2),
    )


def _as_sql(draws: random.Random) -> tuple[str, str]:
    city, item, color, count = draws.choice(CITIES), draws.choice(ITEMS), draws.choice(COLORS), draws.randint(2, 40)
    order = draws.choice(("customer", "count"))
    return (
        f"Write SQL: which customers in {city} ordered more than {count} {color} {item}s? Sort by {order}.",
        f"SELECT customer, city, count\nFROM orders\nWHERE city = '{city}'\n  AND item = '{item}'\n  AND color = '{color}'\n"
        f"  AND count > {count}\nORDER BY {order};",
    )


def _as_table(draws: random.Random) -> tuple[str, str]:
    name, lines = draws.choice(NAMES), _lines(draws)
    body = [f"| {line['item']} | {line['color']} | {line['count']} |" for line in lines]
    total = sum(int(line["count"]) for line in lines)
    rows = ["| item | color | count |", "| --- | --- | --- |", *body, f"| total | | {total} |"]
    return f"Write a table of the order: {name} wants {_in_words(lines)}.", "\n".join(rows)
