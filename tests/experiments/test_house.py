"""What the script says of the package's size is so."""

import fedsim.errors
from experiments import architecture


def test_folders_are_counted_once_and_names_by_the_door_they_take():
    rows = {row["folder"]: row for row in architecture.sizes()}
    parts = [row for name, row in rows.items() if name.startswith("fedsim/")]
    files = [path for path in architecture.sources("fedsim") if path.parent == architecture.PACKAGE]
    assert rows["fedsim"]["modules"] == sum(row["modules"] for row in parts) + len(files)
    found = architecture.imports()
    assert found["modules"] == rows["fedsim"]["modules"]
    assert found["names_through_a_door"] and found["imports_per_module"] < 10


def test_a_walk_has_the_files_whose_functions_run_while_it_is_on():
    walk = architecture.Walk()
    with architecture.profiled(walk):
        fedsim.errors.printable("a")
        walk.on = True
        fedsim.errors.expect_count("a", 1, 1)
        walk.on = False
    assert walk.files == {"fedsim/errors.py"}
    with architecture.profiled(walk):
        walk.files.clear()
        fedsim.errors.printable("a")
    assert not walk.files
