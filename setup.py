"""The C extension of echo2d; everything else is in pyproject.toml.

It is optional: without a working compiler the installation goes on, and numpy serves. It uses the
stable ABI, so that one wheel fits all versions of Python from 3.11 on.
"""

from setuptools import Extension, setup

setup(
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
