"""Wheels: one with the compiled loops for this kind of processor, or, without a C compiler, one for any.

LEAKGAUGE_PURE=1 compiles nothing. The library is not an extension of Python (`harness.core.native` loads it), so either
wheel serves every version of Python.
"""

import os
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

LOOPS = Extension(
    "leakgauge.harness.core._native",
    ["leakgauge/harness/core/native.c"],
    extra_compile_args=["-O3", "-g0", "-fno-math-errno", "-fno-trapping-math"],
    optional=True,
)


class Loops(build_ext):
    """Compiles the loops if it can."""

    def get_ext_filename(self, name):
        """The name of the library, without a version of Python."""
        return os.path.join(*name.split(".")) + ".so"

    def run(self):
        """Compile; a wheel without a library is for any processor."""
        super().run()
        made = all(Path(path).exists() for path in self.get_outputs())
        self.distribution.get_command_obj("bdist_wheel").root_is_pure = not made


class Wheel(bdist_wheel):
    """A wheel for every Python, and for one kind of processor if it has a library."""

    def get_tag(self):
        """The tag."""
        return "py3", "none", "any" if self.root_is_pure else super().get_tag()[2]


PURE = os.environ.get("LEAKGAUGE_PURE", "") not in ("", "0")
setup(ext_modules=[] if PURE else [LOOPS], cmdclass={"build_ext": Loops, "bdist_wheel": Wheel})
