"""Triton's interpreter in half its time.

The interpreter replaces the functions of triton.language in each call of a device function, which takes longer than the
function. Each launch has replaced them already, except those of triton.language.core, which it never restores.
"""


def replace_language_once() -> None:
    """Replace the functions once per module of device functions. Call it before any kernel runs in the interpreter."""
    from triton.runtime.interpreter import InterpretedFunction, _patch_lang

    replaced: set[str] = set()

    def call(self, *args, **kwargs):
        if self.fn.__module__ not in replaced:
            replaced.add(self.fn.__module__)
            _patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    InterpretedFunction.__call__ = call
