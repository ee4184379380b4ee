"""Seeded multi-step arithmetic word problems in GSM8K's own format.

A problem is a story about one person's belongings; its reference answer works it out line by line and ends in
`#### 42`. Two properties matter for rhyme_verl and are built in: answer lengths have a long tail (the number of answer
lines is log-normal), and answers have real entropy in wording (each line picks one of several phrasings, the first ones
more often), so that a draft from history is useful without being trivially right. How long the tail is, is a parameter,
a `Task`: `QUICKSTART` is the demo's, `LONGTAIL` is what benchmarks/policies/longtail has learnt. The rows follow verl's
own GSM8K preprocessing, so verl's rule-based reward scores them unchanged. Knows nothing of tokenizers or models.
"""

import argparse
import dataclasses
import random
from pathlib import Path

NAMES = ("Anna", "Ben", "Carla", "Dan", "Emma", "Finn", "Grace", "Hugo", "Iris", "Jack", "Kate", "Liam", "Mia", "Noah")
PRONOUNS = (("she", "her"), ("he", "him"))  # alternate over NAMES
OBJECTS = (
    "apples",
    "books",
    "cards",
    "coins",
    "marbles",
    "pens",
    "shells",
    "stamps",
    "stickers",
    "stones",
    "toys",
    "tickets",
)
PLACES = (
    "airport",
    "bakery",
    "beach",
    "bridge",
    "cafe",
    "castle",
    "church",
    "cinema",
    "fair",
    "farm",
    "forest",
    "garden",
    "harbor",
    "hotel",
    "lake",
    "library",
    "market",
    "museum",
    "park",
    "river",
    "school",
    "shop",
    "station",
    "theater",
    "tower",
    "zoo",
)

# How a story event reads in the question: b is the amount, k a number of groups or days. Each event has its own place,
# by which the answer refers to it.
EVENTS = {
    "gain": (
        "{she} buys {b} {obj}.",
        "{she} finds {b} more {obj}.",
        "a friend gives {her} {b} {obj}.",
        "{name} gets {b} {obj}.",
    ),
    "lose": (
        "{she} loses {b} {obj}.",
        "{she} sells {b} {obj}.",
        "{name} gives {b} {obj} to a friend.",
        "{she} leaves {b} {obj}.",
    ),
    "multiply": ("{she} wins {b} times as many {obj}.", "a magic box makes it {b} times as many {obj}."),
    "share": (
        "{she} splits the {obj} into {b} equal parts and keeps one part.",
        "{name} sells all but one of {b} equal piles.",
    ),
    "gain_groups": ("{she} buys {k} boxes with {b} {obj} each.", "{k} friends give {her} {b} {obj} each."),
    "lose_groups": ("{she} gives {b} {obj} to each of {k} friends.", "{she} sells {k} boxes with {b} {obj} each."),
    "gain_daily": ("each day for {k} days {she} buys {b} {obj}.", "for {k} days {she} finds {b} {obj} every day."),
    "lose_daily": ("each day for {k} days {she} sells {b} {obj}.", "for {k} days {she} loses {b} {obj} every day."),
}

# How a line of the answer reads: {sum} is "a op b = c". Earlier phrasings are more frequent.
OPENINGS = (
    "{name} starts with {c} {obj}.",
    "At first {name} has {c} {obj}.",
    "The story begins with {c} {obj}.",
    "We begin with {c} {obj}.",
)
PLACE_CONNECTORS = ("At the {place}", "After the {place},", "Then at the {place}", "Leaving the {place},")
CONNECTORS = ("Then", "Next,", "After that,", "Now", "So")
LINES = {
    "gain": (
        "{name} has {sum} {obj}.",
        "{she} has {sum} {obj} in total.",
        "it is {sum} {obj}.",
        "there are {sum} {obj}.",
        "the total grows to {sum}.",
    ),
    "lose": (
        "{name} has {sum} {obj} left.",
        "{she} keeps {sum} {obj}.",
        "it is {sum} {obj}.",
        "there are {sum} {obj} left.",
        "the total falls to {sum}.",
    ),
    "multiply": ("{name} has {sum} {obj}.", "it is {sum} {obj}.", "the total grows to {sum}."),
    "share": ("each part has {sum} {obj}.", "{name} keeps {sum} {obj}.", "the total falls to {sum}."),
    "groups": ("that is {sum} {obj} for all of them.", "all of them make {sum} {obj}.", "we count {sum} {obj}."),
    "daily": (
        "on day {day} it is {sum} {obj}.",
        "day {day} makes it {sum}.",
        "after day {day} there are {sum} {obj}.",
        "{name} has {sum} {obj} on day {day}.",
    ),
}
COUNTED_DAYS = (
    "on day {day} of {days} it is {sum} {obj}.",
    "day {day} of {days} makes it {sum}.",
    "after day {day} of {days} there are {sum} {obj}.",
    "{name} has {sum} {obj} on day {day} of {days}.",
)  # instead of LINES["daily"] where there are many days
CLOSINGS = (
    "{name} has {c} {obj} in the end.",
    "The answer is {c} {obj}.",
    "In total {she} has {c} {obj}.",
    "There are {c} {obj} in the end.",
)

# The first line of a careful answer, and the line that such an answer adds after each sum: the inverse of the sum.
CAREFUL_OPENING = "We check every step."
CHECKS = ("Check: {sum}.", "To check, {sum}.")
INVERSE = {"+": "-", "-": "+", "*": "/", "/": "*"}

# Quantities by level of difficulty: what a person starts with, and a single gain or loss.
START_RANGES = ((4, 20), (10, 50), (20, 99))
AMOUNT_RANGES = ((2, 9), (3, 20), (5, 40))
# What the policy is trained with by RL is harder than what it was taught: there is something left to learn.
TAUGHT_SPLITS = ("policy", "vocabulary")
RL_START_RANGES = ((20, 150),) * 3
RL_AMOUNT_RANGES = ((5, 60),) * 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What kind of problems: how long their answers are.

    Attributes:
        median_lines: of an answer, between its opening and its closing; their number is log-normal.
        sigma_lines: standard deviation of the logarithm of the number of lines.
        max_lines: bound on the number of lines.
        max_days: most lines that one event takes (something that happens on that many days).
        counts_days: whether these lines say how many days there are, which tells a small policy when to stop.
        min_daily_share: an event of several days takes at least this share of the lines that are left.
        max_value: single events do not make a quantity larger.
        careful_share: of the answers, how many check every sum in a line of its own, which doubles their length.
    """

    median_lines: float = 3.4
    sigma_lines: float = 0.66
    max_lines: int = 15
    max_days: int = 9
    counts_days: bool = False
    min_daily_share: float = 0.0
    max_value: int = 199
    careful_share: float = 0.0


QUICKSTART = Task()  # p99 of the answers' lengths is three times the median
LONGTAIL = Task(
    median_lines=2.6,
    sigma_lines=1.35,
    max_lines=24,
    max_days=24,
    counts_days=True,
    min_daily_share=0.6,
    max_value=499,
    careful_share=0.3,
)  # p99 is ten times the median


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One question, its worked reference answer, and the number the answer must end with."""

    question: str
    answer: str
    ground_truth: str


class Story:
    """Builds one problem event by event; `value` is what the person owns after the events so far."""

    def __init__(self, rng: random.Random, task: Task, taught: bool):
        self.rng = rng
        self.task = task
        self.amounts = AMOUNT_RANGES if taught else RL_AMOUNT_RANGES
        starts = START_RANGES if taught else RL_START_RANGES
        who = rng.randrange(len(NAMES))
        she, her = PRONOUNS[who % 2]
        self.words = {"name": NAMES[who], "she": she, "her": her, "obj": rng.choice(OBJECTS)}
        self.places = rng.sample(PLACES, min(task.max_lines, len(PLACES)))  # each event pops one
        self.new_place: str | None = None  # of an event that the answer has not mentioned yet
        self.level = rng.randrange(len(starts))
        self.value = rng.randint(*starts[self.level])
        self.question = [f"{self.words['name']} has {self.value} {self.words['obj']}."]
        self.answer = [self._phrase(OPENINGS, c=self.value)]
        self.careful = task.careful_share > 0 and rng.random() < task.careful_share
        if self.careful:
            self.answer.insert(0, CAREFUL_OPENING)

    def _phrase(self, phrasings: tuple[str, ...], **values) -> str:
        """One phrasing, the r-th with weight 1/r: the skew a trained policy has."""
        weights = [1 / rank for rank in range(1, len(phrasings) + 1)]
        return self.rng.choices(phrasings, weights)[0].format(**self.words, **values)

    def _line(self, kind: str, a: int, op: str, b: int, **values) -> int:
        """Appends one worked answer line and returns its result."""
        c = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[op]
        phrasings = COUNTED_DAYS if kind == "daily" and self.task.counts_days else LINES[kind]
        phrase = self._phrase(phrasings, sum=f"{a} {op} {b} = {c}", **values)
        start = self._phrase(PLACE_CONNECTORS, place=self.new_place) if self.new_place else self._phrase(CONNECTORS)
        self.new_place = None
        self.answer.append(f"{start} {phrase}")
        if self.careful:
            self.answer.append(self._phrase(CHECKS, sum=f"{c} {INVERSE[op]} {b} = {a}"))
        return c

    def add_event(self, max_lines: int) -> int:
        """Adds one event that needs at most `max_lines` (>= 1) answer lines; returns how many it needed."""
        rng, value = self.rng, self.value
        amount, num_groups, num_days = rng.randint(*self.amounts[self.level]), rng.randint(2, 5), 0
        shape = rng.choices(("single", "groups", "daily"), (0.62, 0.2, 0.18 + 0.12 * max_lines))[0]
        if shape == "daily" and max_lines >= 3:
            most = min(self.task.max_days, max_lines)
            num_days = rng.randint(min(max(3, round(self.task.min_daily_share * max_lines)), most), most)
            amount = rng.randint(2, 9)
            kind, change = "daily", num_days * amount
        elif shape == "groups" and max_lines >= 2:
            amount = rng.randint(2, 9)
            kind, change = "groups", num_groups * amount
        else:
            kind, change = "single", amount

        factor = rng.randint(2, 3)
        if kind == "single" and rng.random() < 0.3:
            if value % factor == 0 and value > factor and rng.random() < 0.6:
                self._tell("share", b=factor)
                self.value = self._line("share", value, "/", factor)
                return 1
            if value * factor <= self.task.max_value:
                self._tell("multiply", b=factor)
                self.value = self._line("multiply", value, "*", factor)
                return 1

        loses = value > change and (rng.random() < 0.5 or value + change > self.task.max_value)
        direction, op = ("lose", "-") if loses else ("gain", "+")
        if kind == "daily":
            self._tell(f"{direction}_daily", b=amount, k=num_days)
            for day in range(1, num_days + 1):
                self.value = self._line("daily", self.value, op, amount, day=day, days=num_days)
            return num_days
        if kind == "groups":
            self._tell(f"{direction}_groups", b=amount, k=num_groups)
            amount = self._line("groups", num_groups, "*", amount)
        else:
            self._tell(direction, b=amount)
        self.value = self._line(direction, value, op, amount)
        return 2 if kind == "groups" else 1

    def _tell(self, event: str, **values) -> None:
        self.new_place = self.places.pop()
        happening = self.rng.choice(EVENTS[event]).format(**self.words, **values)
        self.question.append(f"At the {self.new_place} {happening}")

    def finish(self) -> Problem:
        question = " ".join([*self.question, "How many {obj} does {name} have now?".format(**self.words)])
        answer = "\n".join([*self.answer, self._phrase(CLOSINGS, c=self.value), f"#### {self.value}"])
        return Problem(question=question, answer=answer, ground_truth=str(self.value))


def make_problem(split: str, seed: int, index: int, task: Task = QUICKSTART) -> Problem:
    """The problem at `index` of a split: a pure function of its arguments, whatever else is generated."""
    rng = random.Random(f"{split}/{seed}/{index}")
    num_lines = min(max(round(rng.lognormvariate(0.0, task.sigma_lines) * task.median_lines), 1), task.max_lines)
    story = Story(rng, task, split in TAUGHT_SPLITS)
    while num_lines > 0:
        num_lines -= story.add_event(num_lines)
    return story.finish()


def make_row(split: str, seed: int, index: int, task: Task = QUICKSTART) -> dict:
    """The same problem as a row of verl's GSM8K schema (`examples/data_preprocess/gsm8k.py` in verl)."""
    problem = make_problem(split, seed, index, task)
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": problem.question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problem.ground_truth},
        "extra_info": {"split": split, "index": index, "question": problem.question, "answer": problem.answer},
    }


def write_parquet(path: Path, split: str, seed: int, num_rows: int, task: Task = QUICKSTART) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([make_row(split, seed, index, task) for index in range(num_rows)]), path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write train.parquet and test.parquet for verl's GSM8K recipe and reward."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write to; created if missing")
    parser.add_argument("--num-train", type=int, default=64, help="training problems (default: %(default)s)")
    parser.add_argument("--num-test", type=int, default=64, help="test problems (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same files (default: %(default)s)")
    args = parser.parse_args()
    write_parquet(args.out / "train.parquet", "train", args.seed, args.num_train)
    write_parquet(args.out / "test.parquet", "test", args.seed, args.num_test)


if __name__ == "__main__":
    main()
