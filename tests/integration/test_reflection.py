"""Servers describe their services, and clients can call them with that alone."""

import json
import shutil
import subprocess
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from octavo.v1 import generation_pb2

ROOT = Path(__file__).parents[2]
BUF = ROOT / "clients/node/node_modules/.bin/buf"
SERVICE = "octavo.v1.GenerationService"


def test_a_client_without_stubs_generates(served):
    with grpc.insecure_channel(served.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {SERVICE, "grpc.health.v1.Health"} <= set(database.get_services())
        pool = descriptor_pool.DescriptorPool(database)
        service = pool.FindServiceByName(SERVICE)
        described = descriptor_pb2.FileDescriptorProto()
        service.file.CopyToProto(described)
        assert described == descriptor_pb2.FileDescriptorProto.FromString(
            generation_pb2.DESCRIPTOR.serialized_pb
        )

        method = service.methods_by_name["Generate"]
        takes, gives = map(message_factory.GetMessageClass, (method.input_type, method.output_type))
        call = channel.unary_stream(
            f"/{SERVICE}/Generate", takes.SerializeToString, gives.FromString
        )
        request = takes(text="1, 2, 3,", sampling={"temperature": 0}, stop={"max_tokens": 4})
        events = list(call(request, timeout=60))
    assert [event.WhichOneof("event") for event in events[:1]] == ["accepted"]
    assert "".join(event.delta.text for event in events).startswith(" 4")
    assert events[-1].finished.usage.output_tokens == 4


def test_buf_curl_generates(served):
    if not (BUF.exists() and shutil.which("node")):
        pytest.skip("buf is not installed: tests/install_tools.sh does that")

    def curl(path, *arguments):
        url = f"http://{served.address}{path}"
        flags = ("--protocol", "grpc", "--http2-prior-knowledge")
        command = [BUF, "curl", *flags, *arguments, url]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    methods = curl("", "--list-methods").split()
    assert f"{SERVICE}/Generate" in methods
    request = {"text": "1, 2, 3,", "sampling": {"temperature": 0}, "stop": {"maxTokens": 4}}
    answer = curl(f"/{SERVICE}/Generate", "-d", json.dumps(request))
    events, decoder = [], json.JSONDecoder()
    while answer := answer.strip():
        event, end = decoder.raw_decode(answer)
        events.append(event)
        answer = answer[end:]
    assert "accepted" in events[0]
    assert "".join(event.get("delta", {}).get("text", "") for event in events).startswith(" 4")
    assert events[-1]["finished"]["usage"]["outputTokens"] == 4
