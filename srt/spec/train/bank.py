"""Prompts of eight kinds from templates: as many as one likes, no two runs alike, no model needed.

Passages (for summaries, translations, questions with quotes) come from outside: the target writes them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from srt.spec.train import words

KINDS = ("chat", "code", "maths", "summary", "translation", "json", "story", "quotes")

_SLOT = re.compile(r"\{(\w+)\}")

_SLOTS = {
    "topic": words.TOPICS,
    "other": words.TOPICS,
    "name": words.NAMES,
    "friend": words.NAMES,
    "place": words.PLACES,
    "job": words.JOBS,
    "creature": words.CREATURES,
    "thing": words.THINGS,
    "mood": words.MOODS,
    "language": words.LANGUAGES,
    "sentence": words.EVERYDAY,
    "tongue": words.PROGRAMMING,
    "task": words.CODE_TASKS,
    "concept": words.CONCEPTS,
    "goods": words.GOODS,
    "record": words.RECORDS,
    "few": tuple("two three four five six".split()),
    "count": tuple("2 3 4 5 6 7 8 10".split()),
    "short": tuple("50 80 100 120 150".split()),
}

PASSAGE_TEMPLATES = (
    "Write a paragraph about {topic}.",
    "Write an informative passage about {topic} for a general audience.",
    "Write a short encyclopedia entry about {topic}.",
    "Write a news report about {topic} in {place}.",
    "Write a short blog post about {topic} and {other}.",
    "Describe {place} to a visitor who is interested in {topic}.",
    "Write a few paragraphs about the history of {topic}.",
    "Tell a short story about a {job} and a {creature} in {place}.",
    "Write an email from {name} to {friend} about {topic}.",
    "Write a short report about a meeting on {topic} led by {name}.",
    "Write a biography of a {job} called {name} from {place}.",
)

TEMPLATES: dict[str, tuple[str, ...]] = {
    "chat": (
        "What is {topic}?",
        "Tell me about {topic}.",
        "Explain {topic} in simple terms.",
        "Explain {topic} to a ten year old.",
        "Why is {topic} important?",
        "How can I learn more about {topic}?",
        "What are the main advantages and disadvantages of {topic}?",
        "Give me {few} tips about {topic}.",
        "What are some common mistakes people make with {topic}?",
        "I am a {job} and I want to know more about {topic}. Where should I start?",
        "How are {topic} and {other} related?",
        "Compare {topic} and {other}.",
        "I have a free weekend in {place}. What should I do?",
        "What should I pack for a trip to {place}?",
        "My friend {name} is interested in {topic}. What gift could I buy?",
        "List {count} interesting facts about {topic}.",
        "What does a {job} do all day?",
        "How do I become a {job}?",
        "Can you recommend a good way to get started with {topic}?",
        "I feel nervous about {topic}. Any advice?",
        "What would you say to someone who dislikes {topic}?",
        "Write a short email to {name} about {topic}.",
        "Who are you and what can you tell me about {topic}?",
        "What are the steps to prepare for a talk about {topic}?",
        "How has {topic} changed over the last hundred years?",
        "Is it a good idea to combine {topic} with {other}?",
        "Suggest {count} names for a club about {topic}.",
        "What is the difference between {topic} and {other}?",
        "How do I explain {topic} to {name}, who is a {job}?",
        "Make a plan for a week in which I learn about {topic}.",
    ),
    "code": (
        "Write a {tongue} function that {task}.",
        "Write a {tongue} program that {task}.",
        "Write a Python function that {task}. Add a docstring and an example.",
        "Write a Python function that {task} and explain how it works.",
        "How do I write {tongue} code that {task}?",
        "Show me a short {tongue} example that {task}.",
        "Write unit tests for a Python function that {task}.",
        "Write a Python class for a {thing} with {few} methods.",
        "Explain {concept} with an example in {tongue}.",
        "What is {concept} and when would I use it?",
        "Write a {tongue} script that {task}, with comments.",
        "Complete this code:\n\n```python\ndef solve(items):\n    # {task}\n",
        "Write an SQL query that selects all {goods} that cost more than {count} euros.",
        "Create an SQL table for {goods} and insert {few} rows.",
        "Write a simple HTML page about {topic}.",
        "My {tongue} function that {task} is slow. How can I make it faster?",
        "Rewrite this in {tongue}: a loop that {task}.",
        "What is the time complexity of code that {task}?",
        "Write a command line tool in {tongue} that {task}.",
        "Give me {few} exercises about {concept} with solutions in {tongue}.",
    ),
    "maths": (
        "What is {a} plus {b}?",
        "What is {a} times {b}?",
        "Calculate {a} - {b}.",
        "What is {a} divided by {c}?",
        "{name} has {a} {goods} and gives {c} to {friend}. How many {goods} are left?",
        "A shop sells {goods} for {c} euros each. How much do {d} {goods} cost?",
        "{name} buys {c} boxes with {d} {goods} in each. How many {goods} are there in all?",
        "A train travels {a} kilometres in {c} hours. What is its average speed?",
        "Solve for x: {c}x + {d} = {a}.",
        "Solve the equation {c}x - {d} = {b}. Show every step.",
        "What is {e} percent of {a}?",
        "Find the area of a rectangle with sides {c} and {d}.",
        "Find the area of a circle with radius {c}.",
        "What is the square root of {f}?",
        "Simplify the fraction {c}/{d}.",
        "Find the mean of {a}, {b}, {c} and {d}.",
        "{name} reads {c} pages a day. How many days does a book of {a} pages take?",
        "If {c} {goods} cost {b} euros, how much do {d} {goods} cost?",
        "What is the derivative of {c}x^2 + {d}x?",
        "What is the probability of rolling a {g} with a fair die?",
        "{name} is {c} years older than {friend}. Together they are {a} years old. How old are they?",
        "A recipe for {c} people needs {b} grams of flour. How much is needed for {d} people?",
        "Write the number {a} as a product of primes.",
        "Explain step by step how to compute {a} times {c}.",
        "The price of a {thing} is {a} euros. It is reduced by {e} percent. What is the new price?",
    ),
    "summary": (
        "Summarize the following text in one sentence.\n\n{passage}",
        "Summarize the following text in {few} sentences.\n\n{passage}",
        "Summarize this:\n\n{passage}",
        "Give a short summary of this passage:\n\n{passage}",
        "What is the main idea of the following paragraph?\n\n{passage}",
        "List the {few} most important points of this text.\n\n{passage}",
        "{passage}\n\nSummarize the text above.",
        "{passage}\n\nTL;DR",
        "Shorten the following text to at most {short} words:\n\n{passage}",
        "Write a headline and a two sentence summary for this article.\n\n{passage}",
        "Rewrite the following text so that a child understands it.\n\n{passage}",
        "Make bullet points of this text:\n\n{passage}",
        "Read the passage and say briefly what it is about.\n\nPassage: {passage}",
    ),
    "translation": (
        "Translate to {language}: {sentence}.",
        'Translate "{sentence}" into {language}.',
        "How do you say \"{sentence}\" in {language}?",
        "Translate the following sentence into {language}.\n\n{line}",
        "Translate this text into {language}:\n\n{line}",
        "Please translate into {language} and explain the words: {sentence}.",
        "Translate these sentences into {language}:\n1. {sentence}\n2. {sentence2}\n3. {sentence3}",
        "What does \"{sentence}\" mean in {language}? Give the translation only.",
        "Give me {count} useful phrases in {language} for a trip to {place}.",
        "Translate the words {thing}, {creature} and {job} into {language}.",
        "You are a translator. Translate from English to {language}: {line}",
        "Write a greeting in {language} and translate it into English.",
    ),
    "json": (
        "Write a JSON object that describes {record}.",
        "Give me a JSON array of {few} objects, each {record}.",
        "Return only JSON: {record}.",
        "Create a JSON document for a {job} called {name} who lives in {place}.",
        "Write a JSON example with nested objects about {topic}.",
        "Convert this to JSON: name: {name}, job: {job}, city: {place}, age: {a}.",
        "Extract the names and places from this text as JSON.\n\n{line}",
        "Produce a JSON object with the keys title, summary and tags about {topic}.",
        "Write a JSON schema for {record}.",
        "List {count} facts about {topic} as a JSON array of strings.",
        "Make a JSON config file for a program that {task}.",
        "Turn this into JSON with suitable keys: {name} bought {c} {goods} for {a} euros in {place}.",
        "Generate test data in JSON: {few} users with id, name and email.",
        "Answer in JSON with the keys question and answer: what is {topic}?",
    ),
    "story": (
        "Write a short story about a {creature}.",
        "Write a {mood} story about a {job} in {place}.",
        "Tell me a story about a {creature} who finds a {thing}.",
        "Write a story about {name} and {friend}, who discover a {thing} in {place}.",
        "Write the first paragraph of a novel about a {job} and a {thing}.",
        "Tell a bedtime story about a {mood} {creature}.",
        "Write a {mood} story that begins with a {thing} and ends in {place}.",
        "Once upon a time there was a {creature} who loved {topic}. Continue the story.",
        "Write a fairy tale about {topic}.",
        "Write a dialogue between a {creature} and a {job} about {topic}.",
        "Write a short poem about {topic}.",
        "Write a story of about {short} words about a {job} who lost a {thing}.",
        "Write a science fiction story set in {place} about {topic}.",
        "Write a mystery in which {name} the {job} looks for a missing {thing}.",
        "Describe a {mood} day in the life of a {job} in {place}.",
    ),
    "quotes": (
        "{passage}\n\nWhat does the text say about {hint}? Quote the relevant sentence.",
        "{passage}\n\nQuote the sentence that mentions {hint}.",
        "Read this text:\n\n{passage}\n\nAnswer with exact quotes: what is said about {hint}?",
        "Here is a passage.\n\n{passage}\n\nCopy the first sentence of the passage word for word.",
        "Text: {passage}\n\nWhich sentence is the most important one? Quote it and explain why.",
        "{passage}\n\nFind every sentence that contains the word \"{hint}\" and repeat it.",
        "Use quotes from the text to support your answer.\n\n{passage}\n\nWhy does {hint} matter?",
        "{passage}\n\nRepeat the last sentence of the text above exactly.",
        "From the following text, quote {few} facts.\n\n{passage}",
        "Document 1: {passage}\n\nDocument 2: {passage2}\n\nWhich document mentions {hint}? Quote it.",
        "Correct the spelling in this text and return the whole text:\n\n{passage}",
        "Repeat the following text in capital letters where a name appears:\n\n{passage}",
        "Rewrite the text and replace the word {hint} with {thing}:\n\n{passage}",
    ),
}  # fmt: skip


# How a user's words may begin; the target goes on from there, and the whole is a prompt of that kind.
OPENINGS: dict[str, tuple[str, ...]] = {
    "chat": (
        "What is", "What are", "How do I", "How can I", "Why do", "Why is", "Can you explain", "I",
        "I'm", "My", "What's the best way to", "Could you", "Please", "Give me", "Is it", "Should I",
        "Tell me about", "How does", "When", "Where", "Who", "Which", "Do you", "Explain", "Describe",
        "Suggest", "Recommend", "List", "Hi", "Hello", "I need", "I want to", "Help me", "What would",
        "How long", "How much", "What should I", "Write an email", "Write a letter", "Compare",
    ),
    "code": (
        "Write a Python function that", "Write a Python function to", "Write a Python program",
        "Write a function that", "Write a function called", "Write a JavaScript function", "Fix this",
        "What does this code do?\n\n```python\n", "Explain this code:\n\n```", "Write a SQL query",
        "How do I", "Write a class", "Write a C program", "Write a Java method", "Write a bash script",
        "Find the bug in this code:\n\n```python\ndef", "Convert this code", "Write a regex",
        "Write an HTML page", "Implement", "Given a list of", "Given a string", "In Python, how",
        "Add comments to this function:\n\n```python\ndef", "def", "Write a unit test", "Create a",
    ),
    "maths": (
        "If", "A", "A train", "What is", "Calculate", "Solve", "Solve for x:", "How many", "Find the",
        "The sum of", "A rectangle", "A shop", "Sarah has", "Tom has", "There are", "Simplify",
        "What is the value of", "Convert", "A car travels", "The price of", "Explain why", "Prove",
        "What percentage", "How long does it take", "A box contains", "What is the probability",
    ),
    "summary": (
        "Summarize the following text", "Summarize this article", "Summarize the following paragraph",
        "Summarize this", "Give a brief summary", "Write a summary", "In one sentence, summarize",
        "What are the main points", "Summarise the following passage in two sentences.\n\n",
        "Summarize the text below in one sentence:\n\nThe", "TL;DR:", "Condense", "Shorten this text",
    ),
    "translation": (
        "Translate the following sentence into French:", "Translate to Spanish:",
        "Translate the following text to", "Translate \"", "How do you say", "Translate this sentence",
        "Please translate", "Translate from English to", "What is the French word for", "Translate",
        "What does the Spanish", "Give me the Italian translation of", "Translate into French: \"The",
        "Translate this paragraph to Spanish.\n\n", "Translate the following to Italian: I",
    ),
    "json": (
        "Write a JSON", "Create a JSON object", "Generate a JSON", "Convert the following to JSON",
        "Return a JSON object with", "Give me a JSON array of", "Output JSON", "Extract the following",
        "Extract the name", "Produce a JSON", "Provide a JSON example", "Turn this into JSON:",
        "Describe a", "Respond only with JSON", "Make a JSON list of", "Design a JSON schema",
    ),
    "story": (
        "Write a story about", "Write a short story", "Tell me a story", "Once upon a time",
        "Write a tale", "Create a story", "Write a funny story", "Continue this story", "Write a poem",
        "Write the opening of", "Write a dialogue", "Imagine", "Write a scene", "Write a fable",
        "Write a children's story", "Write a mystery", "Write a letter from a character", "In a",
    ),
    "quotes": (
        "Read the following passage", "Read the text and", "Here is a text:\n\n", "Text:", "Passage:",
        "Based on the following text", "According to the passage", "Quote the sentence", "Context:",
        "Answer the question using the text below.\n\n", "Use the following article", "Document:",
        "Repeat the following", "Copy", "The following is an excerpt", "From the text below, quote",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Drawn:
    kind: str
    text: str


def draw_opening(rng: random.Random) -> Drawn:
    """The first words of a prompt, for the target to go on with."""
    kind = rng.choice(KINDS)
    return Drawn(kind, rng.choice(OPENINGS[kind]))


def draw_passage_prompt(rng: random.Random) -> str:
    """A prompt whose answer is a passage for `PromptBank`."""
    return _fill(rng.choice(PASSAGE_TEMPLATES), rng, {})


class PromptBank:
    """Draws prompts; `passages` are texts of some paragraphs, at least one of which is not blank."""

    def __init__(self, passages: Sequence[str]) -> None:
        self._passages = [text for raw in passages if (text := raw.strip())]
        if not self._passages:
            raise ValueError("passages: a prompt bank needs at least one text that is not blank")

    def draw(self, rng: random.Random, kind: str | None = None) -> Drawn:
        kind = kind or rng.choice(KINDS)
        template = rng.choice(TEMPLATES[kind])
        passage = self._passage(rng)
        given = {
            "passage": passage,
            "passage2": self._passage(rng),
            "line": _sentence(passage, rng),
            "hint": _word(passage, rng),
            "sentence2": rng.choice(words.EVERYDAY),
            "sentence3": rng.choice(words.EVERYDAY),
            "a": str(rng.randint(20, 999)),
            "b": str(rng.randint(10, 500)),
            "c": str(rng.randint(2, 15)),
            "d": str(rng.randint(2, 30)),
            "e": str(rng.choice((5, 10, 15, 20, 25, 30, 40, 50, 75))),
            "f": str(rng.randint(2, 25) ** 2),
            "g": str(rng.randint(1, 6)),
        }
        return Drawn(kind, _fill(template, rng, given))

    def _passage(self, rng: random.Random) -> str:
        """Some whole paragraphs or sentences of a passage, rarely all of it."""
        text = rng.choice(self._passages)
        sentences = re.split(r"(?<=[.!?])\s+", text)
        most = rng.choice((3, 5, 8, 12))
        if len(sentences) <= most:
            return text
        first = rng.randrange(len(sentences) - most + 1)
        return " ".join(sentences[first : first + most])


def _fill(template: str, rng: random.Random, given: dict[str, str]) -> str:
    def choose(found: re.Match[str]) -> str:
        slot = found[1]
        return given[slot] if slot in given else rng.choice(_SLOTS[slot])

    text = _SLOT.sub(choose, template)
    return text[0].upper() + text[1:]


def _sentence(passage: str, rng: random.Random) -> str:
    return rng.choice(re.split(r"(?<=[.!?])\s+", passage))


def _word(passage: str, rng: random.Random) -> str:
    """A word of some length, so that asking about it makes sense."""
    found: list[str] = re.findall(r"[A-Za-z]{5,}", passage)
    return rng.choice(found or ["it"])
