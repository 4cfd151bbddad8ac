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
        names = [value(name) for name, _ in node.value]
        if not all(isinstance(name, str) for name in names):
            raise ValueError("expected names before each colon, found another value")
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{twice[0]} is there twice")
        return dict(zip(names, [value(each) for _, each in node.value], strict=True))

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        return None if root is None else value(root)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
