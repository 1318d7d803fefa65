"""Archives of images, made without any container program."""

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Entry = tuple[str, str | bytes | None]
"""A name and its content: bytes of a file, a link's target, None for a folder."""


def make_layer(entries: Iterable[Entry]) -> bytes:
    """A layer: a tar, compressed. A name that begins with `=` is a hard link."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, content in entries:
            member = tarfile.TarInfo(name.removeprefix("="))
            member.mode = 0o755
            member.type = tarfile.DIRTYPE if content is None else tarfile.REGTYPE
            if isinstance(content, str):
                member.type = tarfile.LNKTYPE if name.startswith("=") else tarfile.SYMTYPE
                member.linkname = content
            data = content if isinstance(content, bytes) else b""
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return gzip.compress(stream.getvalue())


def write_image(path: Path, layers: Sequence[bytes], **config: Any) -> Path:
    """Write an OCI archive with these layers; `config` is what commands in it expect."""
    blobs = dict[str, bytes]()

    def add(content: bytes, media_type: str) -> dict[str, Any]:
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        blobs[f"blobs/{digest.replace(':', '/')}"] = content
        return {"mediaType": media_type, "digest": digest, "size": len(content)}

    kind = "application/vnd.oci.image"
    described = [add(one, f"{kind}.layer.v1.tar+gzip") for one in layers]
    settings = add(json.dumps({"config": config}).encode(), f"{kind}.config.v1+json")
    manifest = {"schemaVersion": 2, "config": settings, "layers": described}
    found = add(json.dumps(manifest).encode(), f"{kind}.manifest.v1+json")
    blobs["index.json"] = json.dumps({"schemaVersion": 2, "manifests": [found]}).encode()
    blobs["oci-layout"] = b'{"imageLayoutVersion": "1.0.0"}'
    with tarfile.open(path, "w") as archive:
        for name, content in blobs.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def read_tree(folder: Path) -> list[Entry]:
    """A folder as entries of a layer."""
    entries = list[Entry]()
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            entries.append((name, str(path.readlink())))
        else:
            entries.append((name, None if path.is_dir() else path.read_bytes()))
    return entries
