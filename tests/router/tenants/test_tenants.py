import pytest

from octavo.common.settings import SettingsError
from octavo.router.tenants.tenant import ANONYMOUS, Tenant, hash_key, read_tenants


@pytest.fixture
def read(tmp_path):
    def from_text(text):
        path = tmp_path / "tenants.toml"
        path.write_text(text)
        return read_tenants(path)

    return from_text


def test_a_file_of_tenants(read):
    first, second = read(f"""
[alice]
keys = ["{hash_key("a")}"]
certificates = ["uri:spiffe://x/a", "dns:a.example", "cn:a"]
weight = 2
requests_per_second = 0.5
tokens_per_minute = 6000
max_concurrency = 4
max_priority = 10
models = ["m"]
share_prefixes = "team"
admin = true

["bob-2.x"]
""")
    assert first == Tenant(
        "alice",
        2.0,
        (hash_key("a"),),
        ("uri:spiffe://x/a", "dns:a.example", "cn:a"),
        0.5,
        6000,
        4,
        10,
        frozenset({"m"}),
        "team",
        True,
    )
    assert second == Tenant("bob-2.x")
    assert second.max_priority == 0
    assert second.may_use(["anything"])
    assert first.may_use(["another", "m"])
    assert not first.may_use(["another"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[a", "not valid TOML"),
        ("a = " + "[" * 50_000, "nests arrays or tables too deeply"),
        ("a = " + "1" * 5_001, "not valid TOML.*5001 digits"),
        ("[a]\n__dataclass_self__ = 1", "__dataclass_self__"),
        ("a = 1", "'a' must be a table"),
        ('["a b"]', "a tenant's name"),
        ('[a]\nname = "b"', "a tenant's name"),
        ("[a]\nwieght = 1", "wieght"),
        ("[a]\nweight = 0", r"\[a\] weight"),
        ("[a]\nmax_concurrency = 0", "max_concurrency"),
        ("[a]\nrequests_per_second = -1", "requests_per_second"),
        ("[a]\ntokens_per_minute = inf", "tokens_per_minute"),
        ('[a]\ncertificates = ["alice"]', "uri:..., dns:... or cn:..."),
        (f'[a]\nkeys = ["{hash_key("x")}"]\n[b]\nkeys = ["{hash_key("x")}"]', "share one of"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(read, text, said):
    with pytest.raises(SettingsError, match=said):
        read(text)


def test_a_key_put_where_its_hash_belongs_is_not_repeated(read):
    with pytest.raises(SettingsError, match="octavo key") as caught:
        read('[a]\nkeys = ["octavo_plain"]')
    assert "octavo_plain" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(SettingsError, match=r"none\.toml.*--tenants.*No such file"):
        read_tenants(tmp_path / "none.toml")


def test_prefixes_are_one_s_own_unless_shared():
    a, b = Tenant("a"), Tenant("b")
    team = Tenant("c", share_prefixes="a"), Tenant("d", share_prefixes="a")
    salts = [a.salt(""), a.salt("s"), b.salt(""), b.salt("s"), team[0].salt(""), team[0].salt("s")]
    assert len(set(salts)) == len(salts)
    assert b.salt(a.salt("")) != a.salt("")
    assert team[0].salt("s") == team[1].salt("s")
    assert a.salt("s") == Tenant("a", 3.0).salt("s")
    assert (ANONYMOUS.salt(""), ANONYMOUS.salt("s")) == ("", "s")
