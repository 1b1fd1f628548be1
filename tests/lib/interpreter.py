"""Triton's interpreter in half its time: import this after setting TRITON_INTERPRET, before any kernel runs.

The interpreter replaces the functions of triton.language in each call of a device function, which takes longer than the
function. Each launch has replaced them already, except those of triton.language.core, which it never restores.
"""

from triton.runtime.interpreter import InterpretedFunction, _patch_lang

_patched: set[str] = set()  # modules of device functions


def _call(self, *args, **kwargs):
    if self.fn.__module__ not in _patched:
        _patched.add(self.fn.__module__)
        _patch_lang(self.fn)
    return self.rewrite()(*args, **kwargs)


InterpretedFunction.__call__ = _call
