"""What is pushed to the Hub is what was exported, into a private repository."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants
from pretrained_models import command, make_model, make_texts
from refused import refuses

from fedsim import export as exporting, installation
from fedsim.cli.main import main
from fedsim.export import export
from fedsim.installation import MissingPackage

# The Hub's library passes a file to httpx2 in a way that is on its way out.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


class Hub(BaseHTTPRequestHandler):
    """The requests of the Hub's library that creating a repository and a commit take."""

    def do_POST(self):
        hub, body = self.server.hub, self.body()
        hub["authorised"] &= self.headers["Authorization"] == "Bearer a-token"
        if self.path == "/api/repos/create":
            wanted = json.loads(body)
            there = hub["visibility"] is not None
            hub["visibility"] = hub["visibility"] or wanted["visibility"]
            url = f"http://{self.headers['Host']}/me/model"
            return self.answer({"url": url}, 409 if there else 200)
        if self.path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            found = [
                {"path": f["path"], "shouldIgnore": False, "uploadMode": mode_of(f["path"])}
                for f in json.loads(body)["files"]
            ]
            return self.answer({"files": found})
        if self.path.endswith("/info/lfs/objects/batch"):
            there = f"http://{self.headers['Host']}/lfs/"
            objects = [
                {**x, "actions": {"upload": {"href": there + x["oid"]}}}
                for x in json.loads(body)["objects"]
            ]
            return self.answer({"transfer": "basic", "objects": objects})
        assert "/commit/main" in self.path, self.path
        if hub["full"]:
            return self.answer({"error": "no room\nleft"}, 507)
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                assert value["encoding"] == "base64"
                hub["files"][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                hub["files"][value["path"]] = hub["lfs"][value["oid"]]
            elif line["key"] == "deletedFile":
                del hub["files"][value["path"]]
        hub["commits"] += 1
        url = f"http://{self.headers['Host']}/me/model/commit/abc"
        return self.answer({"commitUrl": url, "commitOid": "abc", "success": True})

    def do_PUT(self):
        data = self.body()
        assert self.path == f"/lfs/{hashlib.sha256(data).hexdigest()}"
        self.server.hub["lfs"][self.path.removeprefix("/lfs/")] = data
        self.answer({})

    def do_GET(self):
        if self.path != "/api/models/me/model":
            return self.answer({}, 404)
        private = self.server.hub["visibility"] == "private"
        files = [{"rfilename": name} for name in self.server.hub["files"]]
        self.answer({"id": "me/model", "private": private, "sha": "abc", "siblings": files})

    def body(self):
        if (length := self.headers["Content-Length"]) is not None:
            return self.rfile.read(int(length))
        data = b""  # in chunks
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def answer(self, record, status=200):
        data = json.dumps(record).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        """Say nothing."""


def mode_of(path):
    return "lfs" if path.endswith(".safetensors") else "regular"


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.hub = {"files": {}, "lfs": {}, "visibility": None, "commits": 0}
    server.hub |= {"authorised": True, "full": False}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "a-token")
    yield server.hub
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    place = tmp_path_factory.mktemp("push")
    flags = {"model": make_model(place), "data": make_texts(place), "lora_rank": 2}
    command("train", "uls", run_dir=place / "run", **flags)
    return place / "run"


@pytest.mark.parametrize("adapter", [False, True])
def test_what_is_pushed_is_what_was_exported(adapter, hub, run_dir, tmp_path, capsys, monkeypatch):
    """Of the repository's other files, none is left but the Hub's own."""
    hub["files"] = {"README.md": b"another claim", "adapter.bin": b"old", ".gitattributes": b""}
    if adapter:
        monkeypatch.setattr(exporting.pretrained, "named", lambda source: ("some/base", None))
    words = ["--adapter"] if adapter else []
    out = tmp_path / "out"
    main(["export", str(run_dir), "--out", str(out), "--push", "me/model", "--json", *words])
    assert json.loads(capsys.readouterr().out)["pushed"] == f"{constants.ENDPOINT}/me/model"
    there = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*")}
    assert hub["files"].pop(".gitattributes") == b""
    assert hub["files"] == there and hub["commits"] == 1 and hub["authorised"]
    assert hub["visibility"] == "private" and list(hub["lfs"].values()) != []
    assert b"## Privacy" in there["README.md"]
    secret = json.loads((run_dir / "secret.json").read_text())
    texts = [str(value).encode() for value in secret.values() if len(str(value)) > 8]
    texts += [b"non_private", b"eval/loss", b"red green"]
    assert not any(text in data for text in texts for data in there.values())


def test_no_place_of_this_machine_is_pushed(hub, run_dir, tmp_path):
    place = run_dir.parent / "model"
    with refuses("push=me/model", says=f"files without {place}, which adapter_config.json names"):
        export(str(run_dir), tmp_path / "out", adapter=True, push="me/model")
    assert hub["visibility"] is None and not hub["files"]


def test_only_who_asks_for_it_makes_a_model_public(hub, run_dir, tmp_path):
    hub["visibility"] = "public"  # and was there before
    with refuses("push=me/model", says=f"or --public beside it; {tmp_path / 'a'} is written"):
        export(str(run_dir), tmp_path / "a", push="me/model")
    assert not hub["files"] and (tmp_path / "a" / "config.json").is_file()
    export(str(run_dir), tmp_path / "b", push="me/model", public=True)
    assert "config.json" in hub["files"]
    with refuses("public=True", says="--push beside it"):
        export(str(run_dir), tmp_path / "c", public=True)


def test_a_push_that_fails_is_one_line(hub, run_dir, tmp_path, monkeypatch):
    hub["full"] = True
    with refuses("push=me/model", says="that you may write to (") as raised:
        export(str(run_dir), tmp_path / "a", push="me/model")
    assert "\n" not in str(raised.value) and (tmp_path / "a").is_dir()
    with refuses("push=model", says="such as name/model"):
        export(str(run_dir), tmp_path / "b", push="model")
    monkeypatch.setattr(installation, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match="the package huggingface_hub is not installed"):
        export(str(run_dir), tmp_path / "b", push="me/model")
    assert not (tmp_path / "b").exists()
