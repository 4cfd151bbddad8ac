"""YAML of strangers and of settings: values as they are written, without aliases."""

from typing import Any


def yaml_values(text: str) -> Any:
    """Values of YAML as they are written: 007 keeps its zeros, no is a word, and null is None.

    Raises: ValueError: it is no YAML, or has a name twice, or an alias, by which a few lines stand
      for gigabytes.
    """
    import yaml

    seen: set[int] = set()

    def value(node: Any) -> Any:
        if id(node) in seen:
            raise ValueError("expected values, found an alias (*name)")
        seen.add(id(node))
        if node.id == "scalar":
            return None if node.tag == "tag:yaml.org,2002:null" else node.value
        if node.id == "sequence":
            return [value(each) for each in node.value]
        names = [str(value(name)) for name, _ in node.value]
        if len({*names}) < len(names):
            raise ValueError("a name is there twice")
        return {name: value(each) for name, (_, each) in zip(names, node.value, strict=True)}

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    return None if root is None else value(root)
