"""Other versions of packages, as they would be installed."""


def install(package, directory, monkeypatch):
    """Makes the version of a package 99.1, for whoever asks."""
    about = directory / f"{package}-99.1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 99.1\n")
    monkeypatch.syspath_prepend(directory)
