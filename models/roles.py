"""What a parameter is: embedding, head, matrices (of the blocks) or vectors, and which names and patterns mean it."""

from collections.abc import Iterator
from fnmatch import fnmatchcase


def is_meant(patterns: list[str], name: str, role: str) -> bool:
    """Whether one of patterns, roles or names with wildcards (blocks.*.proj.weight), means that parameter."""
    return any(role == pattern or fnmatchcase(name, pattern) for pattern in patterns)


def with_roles(model) -> Iterator[tuple]:
    """(name, role, parameter) of all parameters; a head that is also the embedding is an embedding."""
    from torch import nn

    matrices = {id(parameter) for parameter in model.hidden_matrices()}
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, parameter in model.named_parameters():
        if id(parameter) in matrices:
            role = "matrices"
        elif parameter.ndim < 2:
            role = "vectors"
        else:
            role = "embedding" if id(parameter) in tables else "head"
        yield name, role, parameter
