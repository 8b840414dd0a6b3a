"""Which linears a quantization method touches. How they are packed is `kernels.linear`'s."""

from __future__ import annotations

from srt.errors import ConfigError

METHODS = ("int8", "fp8", "int4")


def quantization_of(parameter: str, method: str | None) -> str | None:
    """The method for one linear, by its parameter name, or None to leave it as stored.

    int8: every linear, the output projection too: on small models it is a large share of the bytes
    read per token. fp8, int4: all but the output projection, whose rounding would show in every token.
    Norms and the embedding are no linears. A router stays as it is: which experts a token gets would
    change with its rounding.
    """
    if method is None:
        return None
    if method not in METHODS:
        raise ConfigError(
            f"quantization {method!r} is not implemented; known: {', '.join(METHODS)}"
        )
    is_kept = parameter.endswith(".router") or (parameter == "head" and method != "int8")
    return None if is_kept else method
