"""The packages of echo2d, its C extension and its description on a package index; all else is in pyproject.toml.

The folder `learner` at the top is the package `echo2d.learner`.

The extension is optional: without a working compiler the installation goes on, and numpy serves. It
uses the stable ABI, so that one wheel fits all versions of Python from 3.11 on.
"""

import re
from pathlib import Path

from setuptools import Extension, find_namespace_packages, setup


def description(readme: str) -> str:
    """README without the pictures and links that lead to files beside it: elsewhere they are not there."""
    without_pictures = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n*", "", readme)
    return re.sub(r"\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", without_pictures)


def packages() -> list[str]:
    """All of echo2d, and the learner, which lies beside it."""
    inside = [f"echo2d.learner.{name}" for name in find_namespace_packages("learner")]
    return [*find_namespace_packages(include=["echo2d*"]), "echo2d.learner", *inside]


if __name__ == "__main__":
    setup(
        packages=packages(),
        package_dir={"echo2d.learner": "learner"},
        long_description=description((Path(__file__).parent / "README.md").read_text()),
        long_description_content_type="text/markdown",
        ext_modules=[
            Extension(
                "echo2d.native._words",
                ["echo2d/native/words.c"],
                depends=["echo2d/native/kernels.h"],
                extra_compile_args=["-O3", "-Wall", "-Wextra"],
                py_limited_api=True,
                optional=True,
            )
        ],
        options={"bdist_wheel": {"py_limited_api": "cp311"}},
    )
