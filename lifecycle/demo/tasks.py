"""Tasks whose answers a program can verify. Text in, numbers out; knows nothing of models."""

from __future__ import annotations

import re
import string
from random import Random
from typing import Protocol

from attrs import frozen


@frozen
class Question:
    """What is asked, and what a verifier must know to judge the answer."""

    user: str
    system: str = ""
    expected: str = ""


@frozen
class Verdict:
    """``correct`` is what was asked for, done or not; ``reward`` is what training gets, between 0 and 1."""

    reward: float
    correct: bool


class Task(Protocol):
    """Questions without end, and the verdict on an answer."""

    @property
    def description(self) -> str: ...

    def questions(self, count: int, random: Random) -> tuple[Question, ...]: ...

    def probe(self) -> Question:
        """One question, always the same."""
        ...

    def judge(self, question: Question, answer: str, used: float) -> Verdict:
        """``used`` is the share of the permitted tokens that the answer took, between 0 and 1."""
        ...


@frozen
class Sums:
    """Add two digits and say so briefly. The last number of the answer counts, as in grade-school benchmarks."""

    description: str = "half for an answer whose last number is the sum, half for brevity if it has a number at all"

    def questions(self, count: int, random: Random) -> tuple[Question, ...]:
        return tuple(self._question(random.randint(2, 9), random.randint(2, 9)) for _ in range(count))

    def probe(self) -> Question:
        return self._question(7, 6)

    def _question(self, a: int, b: int) -> Question:
        return Question(f"What is {a} + {b}?", "Answer with a number only.", str(a + b))

    def judge(self, question: Question, answer: str, used: float) -> Verdict:
        numbers = re.findall(r"\d+", answer)
        correct = numbers[-1:] == [question.expected]
        return Verdict((correct + 1 - used) / 2 if numbers else 0.0, correct)


@frozen
class Letters:
    """Write letters of the English alphabet and nothing else: for a model that begins with noise."""

    description: str = "the share of the answer's characters that are letters from a to z or A to Z"

    def questions(self, count: int, random: Random) -> tuple[Question, ...]:
        return (self.probe(),) * count

    def probe(self) -> Question:
        return Question("Letters: ")

    def judge(self, question: Question, answer: str, used: float) -> Verdict:
        letters = sum(character in string.ascii_letters for character in answer)
        return Verdict(letters / max(len(answer), 1), 0 < letters == len(answer))
