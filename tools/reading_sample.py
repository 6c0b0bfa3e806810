"""Draws places of the product and its documents for a fresh reader: `python -m tools.reading_sample SEED [--places
200]`.

The reader has the prompt below and nothing else, and marks each place that has to be read twice. The share of marked
places, as the mean of two readers, says whether the sentences are plain. A place is a head of a module, a docstring,
a comment, an error text, a help text, a paragraph of a document, or the name of a test, in these numbers of 200:
37, 45, 43, 30, 15, 20, 10.
"""

import argparse
import ast
import io
import random
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).parents[1]
SHARES = {
    "head": 37,
    "docstring": 45,
    "comment": 43,
    "error": 30,
    "help": 15,
    "paragraph": 20,
    "test": 10,
}
PROMPT = """You are an engineer who trains language models with reinforcement learning. You know the field (rollouts,
policies, staleness, LoRA, SGLang, asyncio, SQLite) and have never seen this project. Below are places of its source and
documents: each has a number, its kind, its file and its text; code next to a comment is shown behind `|`. Read each
text once, at the speed at which you read documentation. Mark a place if you had to read a sentence of it again to
know what it says, because of its words or its grammar. A term that you can only learn from the project's glossary is
no reason; a sentence that is wrong, ambiguous, or lacks its subject is one. Do not be kind, and do not be pedantic.
Answer with one line for each marked place: its number, the words that stopped you, and how you would say it. End with a
line "marked N of M".
"""


def files(*suffixes: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=REPO, capture_output=True, text=True, check=True
    ).stdout.split()
    found = [REPO / each for each in listed if each.endswith(suffixes)]
    return [path for path in found if path.is_file() and not path.is_symlink()]


def of_python(path: Path) -> Iterator[tuple[str, int, str]]:
    """Kind, line and text of each place of a module."""
    text = path.read_text()
    tree, lines = ast.parse(text), text.split("\n")
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            said = ast.get_docstring(node)
            if said:
                kind = "head" if isinstance(node, ast.Module) else "docstring"
                name = "" if isinstance(node, ast.Module) else f"{node.name}: "
                yield kind, getattr(node, "lineno", 1), name + said
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            said = " ".join(map(ast.unparse, node.exc.args))
            if " " in said:
                yield "error", node.lineno, said
        elif isinstance(node, ast.keyword) and node.arg == "help":
            yield "help", node.value.lineno, ast.unparse(node.value)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        row = token.start[0]
        above = lines[row - 2].strip() if row > 1 else ""
        if token.type == tokenize.COMMENT and not above.startswith("#") and " " in token.string:
            if re.match(r"# (noqa|type:|fmt:|---)", token.string):
                continue
            end = row
            while end < len(lines) and lines[end].strip().startswith("#"):
                end += 1
            shown = [f"| {each}" for each in lines[row - 1 : end + 1]]
            yield "comment", row, "\n".join(shown)


def paragraphs(path: Path) -> Iterator[tuple[str, int, str]]:
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for part in re.split(r"\n\s*\n", text):
        if len(part.split()) > 12 and not part.lstrip().startswith(("|", "#", "    ")):
            yield "paragraph", 0, part.strip()


def places() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {kind: [] for kind in SHARES}
    for path in files(".py", ".md"):
        name = str(path.relative_to(REPO))
        if name.startswith("tests/"):
            if name.endswith(".py"):
                names = re.findall(r"^\s*(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
                found["test"] += [f"{name}\n{each}" for each in names]
        elif name.endswith(".md") or name.startswith(("echo2d/", "learner/")):
            read = paragraphs if name.endswith(".md") else of_python
            for kind, line, text in read(path):
                found[kind].append(f"{name}:{line}\n{text}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--places", type=int, default=200)
    wanted = parser.parse_args()
    chance, found = random.Random(wanted.seed), places()
    drawn = [
        (kind, text)
        for kind, share in SHARES.items()
        for text in chance.sample(found[kind], round(share * wanted.places / 200))
    ]
    chance.shuffle(drawn)
    print(PROMPT)
    for number, (kind, text) in enumerate(drawn, 1):
        print(f"\n[{number}] {kind} {text}")


if __name__ == "__main__":
    main()
