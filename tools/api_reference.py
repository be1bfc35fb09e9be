"""Write docs/api.md, the reference of the contracts, from their comments."""

import subprocess
import sys
import tempfile
from importlib import resources
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

ROOT = Path(__file__).parents[1]
PROTOS = ROOT / "protos"
TARGET = ROOT / "docs" / "api.md"
CONTRACTS = ("generation", "sampling", "admin", "engine")
"""What clients need comes first."""

HEAD = """\
# The contracts

<!-- Made from the comments in protos/octavo/v1 by `make docs`. -->

Package `octavo.v1`. A router offers GenerationService to clients and, on a port of its own,
AdminService to operators; an engine offers EngineService to routers. Each also offers
`grpc.health.v1.Health` and [reflection](#calling-without-stubs). Released contracts change by
addition only: [protos/README.md](../protos/README.md) has the rules.

A failed call has one of these statuses. The trailer `grpc-status-details-bin` has the details:
google.rpc.BadRequest names the invalid field, google.rpc.RetryInfo the time to retry.

| status | reason | what to do |
| --- | --- | --- |
| INVALID_ARGUMENT | a field is invalid; BadRequest | correct the field |
| NOT_FOUND | no such model or engine; BadRequest | call `ListModels` |
| FAILED_PRECONDITION | the model has no chat template; BadRequest | send text |
| UNIMPLEMENTED | the model's engines lack the feature; BadRequest | leave it out |
| UNAUTHENTICATED | no valid key or certificate | send one |
| PERMISSION_DENIED | the tenant may not use this model or priority | use another |
| RESOURCE_EXHAUSTED | a queue or quota is full, or the deadline too short; RetryInfo | retry |
| UNAVAILABLE | no engine of the model is up, or the server stops; RetryInfo if known | retry |
| DEADLINE_EXCEEDED | the call's deadline passed | set a longer deadline |
| CANCELLED | the client cancelled, or did not read its stream | |
| INTERNAL | the server failed; its log has the reason | retry, and report it |
"""

TAIL = """\
## Calling without stubs

Servers describe their services by reflection, so generic tools can call them:
[grpcurl](https://github.com/fullstorydev/grpcurl), or `buf curl` of the npm package
`@bufbuild/buf`.

```sh
grpcurl -plaintext localhost:50051 list
grpcurl -plaintext localhost:50051 describe octavo.v1.GenerateRequest
grpcurl -plaintext -d '{"text": "1, 2, 3,", "stop": {"max_tokens": 16}}' \\
  localhost:50051 octavo.v1.GenerationService/Generate
```

```sh
buf curl --protocol grpc --http2-prior-knowledge --list-methods http://localhost:50051
buf curl --protocol grpc --http2-prior-knowledge \\
  -d '{"text": "1, 2, 3,", "stop": {"maxTokens": 16}}' \\
  http://localhost:50051/octavo.v1.GenerationService/Generate
```

If the router has tenants, reflection needs a key too:
`-H 'authorization: Bearer KEY'`, and `--reflect-header` of the same with `buf curl`.
"""

# Field numbers of descriptor.proto, of which source locations are made.
_FILE_MESSAGE, _FILE_ENUM, _FILE_SERVICE, _FILE_SYNTAX = 4, 5, 6, 12
_FIELD = _VALUE = _METHOD = 2

_SCALARS = {
    number: name.removeprefix("TYPE_").lower() for name, number in FieldDescriptorProto.Type.items()
}


class _Contract:
    """One file, and the comments in it by source location."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self.file = file
        self._comments = {
            tuple(location.path): location.leading_comments
            for location in file.source_code_info.location
        }

    def comment(self, *path: int) -> str:
        """Return the comment before a declaration, as one paragraph.

        Raises:
            ValueError: There is none.
        """
        comment = " ".join(self._comments.get(path, "").split())
        if not comment:
            raise ValueError(f"{self.file.name}: a declaration has no comment (at {path})")
        return comment.replace("|", r"\|")


def reference() -> str:
    """Return the text of docs/api.md.

    Raises:
        subprocess.CalledProcessError: A contract does not compile; protoc has printed where.
        ValueError: A declaration has no comment.
    """
    files = {file.name: file for file in _compile().file}
    parts = [HEAD]
    for name in CONTRACTS:
        contract = _Contract(files[f"octavo/v1/{name}.proto"])
        parts += [f"## {name}.proto", contract.comment(_FILE_SYNTAX)]
        for i, service in enumerate(contract.file.service):
            parts += _service(contract, service, (_FILE_SERVICE, i))
        for i, message in enumerate(contract.file.message_type):
            parts += _message(contract, message, (_FILE_MESSAGE, i))
        for i, enum in enumerate(contract.file.enum_type):
            parts += _enum(contract, enum, (_FILE_ENUM, i))
    return "\n\n".join(part.strip() for part in [*parts, TAIL]) + "\n"


def _compile() -> FileDescriptorSet:
    well_known = resources.files("grpc_tools") / "_proto"
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "contracts.binpb"
        subprocess.run(
            [
                sys.executable,
                "-m",
                "grpc_tools.protoc",
                f"--proto_path={PROTOS}",
                f"--proto_path={well_known}",
                "--include_source_info",
                f"--descriptor_set_out={target}",
                *(f"octavo/v1/{name}.proto" for name in CONTRACTS),
            ],
            check=True,
        )
        return FileDescriptorSet.FromString(target.read_bytes())


def _service(
    contract: _Contract, service: ServiceDescriptorProto, path: tuple[int, ...]
) -> list[str]:
    rows = ["| call | takes | gives | |", "| --- | --- | --- | --- |"]
    for i, method in enumerate(service.method):
        takes = _stream(method.client_streaming) + _link(method.input_type)
        gives = _stream(method.server_streaming) + _link(method.output_type)
        about = contract.comment(*path, _METHOD, i)
        rows.append(f"| `{method.name}` | {takes} | {gives} | {about} |")
    return [f"### {service.name}", contract.comment(*path), "\n".join(rows)]


def _message(contract: _Contract, message: DescriptorProto, path: tuple[int, ...]) -> list[str]:
    parts = [f"### {message.name}", contract.comment(*path)]
    if message.field:
        rows = ["| field | type | |", "| --- | --- | --- |"]
        for i, field in enumerate(message.field):
            about = contract.comment(*path, _FIELD, i)
            rows.append(f"| `{field.name}` = {field.number} | {_type(message, field)} | {about} |")
        parts.append("\n".join(rows))
    return parts


def _enum(contract: _Contract, enum: EnumDescriptorProto, path: tuple[int, ...]) -> list[str]:
    rows = ["| value | |", "| --- | --- |"]
    for i, value in enumerate(enum.value):
        about = contract.comment(*path, _VALUE, i)
        rows.append(f"| `{value.name}` = {value.number} | {about} |")
    return [f"### {enum.name}", contract.comment(*path), "\n".join(rows)]


def _type(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    """Return a field's type as the contract has it, other messages as links."""
    entries = {entry.name: entry for entry in message.nested_type if entry.options.map_entry}
    if entry := entries.get(field.type_name.rpartition(".")[2]):
        key, value = entry.field
        return f"map of {_plain_type(key)} to {_plain_type(value)}"
    plain = _plain_type(field)
    if field.proto3_optional:
        return f"optional {plain}"
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {plain}"
    if field.HasField("oneof_index"):
        return f"one of `{message.oneof_decl[field.oneof_index].name}`: {plain}"
    return plain


def _plain_type(field: FieldDescriptorProto) -> str:
    return _link(field.type_name) if field.type_name else _SCALARS[field.type]


def _link(full_name: str) -> str:
    package, _, name = full_name.removeprefix(".").rpartition(".")
    return f"[{name}](#{name.lower()})" if package == "octavo.v1" else f"`{package}.{name}`"


def _stream(streaming: bool) -> str:
    return "stream of " if streaming else ""


if __name__ == "__main__":
    TARGET.write_text(reference())
