"""The fleet as a value and as a file."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.errors import InputError
from convoy.fleet import MAX_SLOWDOWN, WITHIN_HOST, Device, Fleet, Host, Link, NetworkSegment, Nic, read_fleet
from convoy.fleet.file import KINDS, LEAST, MOST
from tests.support.good_files import HOSTS, LINK
from tests.support.processes import ROOT

FLEETS = ROOT / "benchmarks" / "fleets"

TEXT = f"""{HOSTS}
[[device]]
name = "cellar-gpu"
host = "cellar"
kind = "cuda"
memory_bytes = 8_000_000_000
idle_w = 20
busy_w = 180

[[device]]
name = "attic-gpu"
host = "attic"
kind = "cuda"
slowdown = 2
{LINK}"""

positive = st.floats(min_value=LEAST, max_value=MOST)
not_negative = st.floats(min_value=0, max_value=1e6)
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)
cards = st.builds(Nic, positive, positive, not_negative)
WATTS = st.tuples(not_negative, not_negative).map(sorted)


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    host_names = draw(st.lists(names, min_size=1, max_size=4, unique=True))
    # What begins with a dash is refused: it would be an option of ssh.
    addresses = st.none() | st.from_regex(r"[!-,.-~][!-~]{0,19}", fullmatch=True)
    hosts = [Host(name, draw(addresses), draw(st.none() | cards)) for name in host_names]
    homes = host_names + draw(st.lists(st.sampled_from(host_names), max_size=3))
    devices = []
    for name, home in zip(
        draw(st.lists(names, min_size=len(homes), max_size=len(homes), unique=True)), homes, strict=True
    ):
        idle_w, busy_w = draw(WATTS)
        devices.append(
            Device(
                name,
                home,
                draw(st.sampled_from(KINDS)),
                cores=draw(st.none() | positive),
                slowdown=draw(st.floats(min_value=1, max_value=MAX_SLOWDOWN)),
                memory_bytes=draw(st.none() | st.integers(1, 2**63 - 1)),
                peak_flop_per_s=draw(st.none() | positive),
                memory_bytes_per_s=draw(st.none() | positive),
                idle_w=draw(st.sampled_from([None, idle_w])),
                busy_w=draw(st.sampled_from([None, busy_w])),
            )
        )
    pairs = draw(st.lists(st.tuples(st.sampled_from(host_names), st.sampled_from(host_names)), max_size=4, unique=True))
    links = tuple(Link(source, target, draw(positive), draw(not_negative)) for source, target in pairs)
    cut = draw(st.integers(0, len(host_names)))
    groups = [group for group in (host_names[:cut], host_names[cut:]) if group]
    segments = tuple(NetworkSegment(f"s{index}", tuple(group), draw(cards)) for index, group in enumerate(groups))
    return Fleet(tuple(hosts), tuple(devices), draw(cards), links, draw(st.sampled_from([(), segments])))


@given(fleets())
def test_a_fleet_survives_its_file(fleet: Fleet) -> None:
    assert Fleet.from_toml(fleet.to_toml()) == fleet


def test_fleet_file_values_are_read_unchanged() -> None:
    fast, slow = Nic(125e6, 125e6, 1e-4), Nic(12.5e6, 25e6, 2e-4)
    assert Fleet.from_toml(TEXT) == Fleet(
        hosts=(Host("attic", "192.168.1.20"), Host("cellar", card=slow)),
        devices=(
            Device("attic-cpu", "attic", "cpu", cores=0.45),
            Device("cellar-gpu", "cellar", "cuda", memory_bytes=8_000_000_000, idle_w=20, busy_w=180),
            Device("attic-gpu", "attic", "cuda", slowdown=2),
        ),
        network=fast,
        links=(Link("attic", "cellar", 11e6, 3e-4),),
    )


def test_ssh_settings_of_a_host_are_read() -> None:
    told = 'user = "ann"\nssh_port = 2222\npython = "/opt/convoy/bin/python"\nfolder = "/home/ann/my nets"\n'
    text = TEXT.replace('address = "192.168.1.20"\n', f'address = "attic.lan"\n{told}')
    host = Host("attic", "attic.lan", None, "ann", 2222, "/opt/convoy/bin/python", "/home/ann/my nets")
    fleet = Fleet.from_toml(text)
    assert fleet.hosts[0] == host
    assert Fleet.from_toml(fleet.to_toml()) == fleet


def test_one_host_needs_no_network() -> None:
    fleet = Fleet((Host("here"),), (Device("cpu", "here", "cpu"),))
    assert Fleet.from_toml(fleet.to_toml()) == fleet
    assert fleet.path("here", "here") == Link("here", "here", WITHIN_HOST.send_bytes_per_s, WITHIN_HOST.latency_s)
    with pytest.raises(InputError, match=r"'here' has no NIC: add"):
        fleet.nic("here")


def test_link_rates_are_measured_or_follow_from_the_nics() -> None:
    fleet = Fleet.from_toml(TEXT)
    assert fleet.nic("attic") == Nic(125e6, 125e6, 1e-4)
    assert fleet.path("attic", "cellar") == Link("attic", "cellar", 11e6, 3e-4)
    assert fleet.path("cellar", "attic") == Link("cellar", "attic", 12.5e6, 2e-4)
    assert replace(fleet, links=()).path("attic", "cellar") == Link("attic", "cellar", 25e6, 2e-4)
    with pytest.raises(InputError, match="unknown host 'roof': choose one of attic, cellar"):
        fleet.path("attic", "roof")


TWO_FLOORS = """
[[segment]]
name = "upstairs"
hosts = ["attic"]
uplink = { send_bytes_per_s = 5e6, receive_bytes_per_s = 30e6, latency_s = 1e-3 }
"""


def test_messages_between_segments_cross_their_uplinks() -> None:
    fleet = replace(Fleet.from_toml(TEXT + TWO_FLOORS), links=())
    assert fleet.segments == (NetworkSegment("upstairs", ("attic",), Nic(5e6, 30e6, 1e-3)),)
    assert fleet.path("attic", "cellar") == Link("attic", "cellar", 5e6, 2e-4 + 1e-3)
    assert fleet.path("cellar", "attic") == Link("cellar", "attic", 12.5e6, 2e-4 + 1e-3)
    assert fleet.path("attic", "attic").latency_s == WITHIN_HOST.latency_s
    assert fleet.with_only({1}).segments == ()
    both = replace(fleet, segments=(NetworkSegment("all", ("attic", "cellar"), Nic(1e6, 1e6, 1.0)),))
    assert both.path("attic", "cellar") == Link("attic", "cellar", 25e6, 2e-4)
    assert both.with_only({1}).segments[0].hosts == ("cellar",)


def test_devices_of_a_host_keep_their_index() -> None:
    fleet = Fleet.from_toml(TEXT)
    assert fleet.devices_on("attic") == (0, 2)
    assert fleet.devices_on("cellar") == (1,)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('["attic"]', '["attik"]', r"segment\[0\]\.hosts\[0\]: unknown host 'attik': choose one of attic, cellar"),
        ('["attic"]', "[]", r"segment 'upstairs' has no hosts: name at least one"),
        ("1e-3 }", "1e-3, ratte = 1 }", r"segment\[0\]\.uplink\.ratte = 1: unknown key"),
        (
            '"attic"]\nuplink',
            '"attic", "attic"]\nuplink',
            r"'attic' is also in segment\[0\]: a host is in at most one segment",
        ),
        ("5e6,", "-1,", r"send_bytes_per_s = -1.* of a NIC: must be a finite number, at least 1e-12"),
    ],
)
def test_invalid_segments_are_refused(old: str, new: str, message: str) -> None:
    assert old in TWO_FLOORS
    with pytest.raises(InputError, match=message):
        Fleet.from_toml(TEXT + TWO_FLOORS.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("cores = 0.45", "corse = 0.45", r"device\[0\]\.corse = 0\.45: unknown key; the keys known here are name, "),
        ("[network]", "[netwrok]", r"my\.toml: netwrok = .*unknown key; the keys known here are host, device, network"),
        ("25e6, lat", "25e6, rate = 1, lat", r"host\[1\]\.card\.rate = 1: unknown key; .* are send_bytes_per_s"),
        ('kind = "cpu"\n', "", r"device\[0\]\.kind is missing: add it"),
        ("cores = 0.45", "cores = 0", r"device\[0\]\.cores = 0(\.0)? of device 'attic-cpu': must be .* at least 1e-12"),
        ("cores = 0.45", 'cores = "half"', r"device\[0\]\.cores = 'half': "),
        ("8_000_000_000", '"8 GX"', r"device\[1\]\.memory_bytes = '8 GX': 'GX' is no unit"),
        ("busy_w = 180", "busy_w = 10", r"device\[1\]\.busy_w = 10(\.0)? of .*at least 20"),
        ('kind = "cpu"', 'kind = "gpu"', r"device\[0\]\.kind = 'gpu' .*choose one of cpu, cuda"),
        ('name = "cellar"', 'name = "attic"', r"host\[1\] 'attic' exists twice"),
        ('name = "attic"', 'name = "at tic"', r"host\[0\]\.name = 'at tic' of a host: a name is"),
        ('"192.168.1.20"', '"my host"', r"host\[0\]\.address = 'my host'"),
        ('"192.168.1.20"', '"-oProxyCommand=x"', r"host\[0\]\.address = '-oProxyCommand=x'"),
        ('"192.168.1.20"', '"a"\nuser = "-x"', r"host\[0\]\.user = '-x' of host 'attic': .* correct it"),
        (
            '"192.168.1.20"',
            '"a"\nssh_port = 0',
            r"host\[0\]\.ssh_port = 0 of host 'attic': .* at least 1 and at most 65535",
        ),
        ('"192.168.1.20"', '"a"\npython = ""', r"host\[0\]\.python = '' of host 'attic': give a path"),
        ('"192.168.1.20"', '"a"\nfolder = "a\\nb"', r"host\[0\]\.folder = 'a\\nb' of host 'attic': give a path"),
        ('host = "cellar"', 'host = "roof"', r"device\[1\]\.host: unknown host 'roof': choose one of attic, cellar"),
        ('target = "cellar"', 'target = "roof"', r"link\[0\]\.target: unknown host 'roof'"),
        ('host = "cellar"', 'host = "attic"', r"host\[1\] 'cellar' has no device: add"),
        ("[[host]]", "[[host]", r"my\.toml: not TOML: .*line 7.*; correct"),
        ("[[device]]", "[[thing]]", r"my\.toml: device is missing: add it"),
    ],
)
def test_bad_file_is_refused_with_the_location(old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(InputError, match=message):
        Fleet.from_toml(TEXT.replace(old, new), source="my.toml")


def test_all_errors_are_reported_at_once() -> None:
    text = TEXT.replace("cores = 0.45", "cores = -1").replace("slowdown = 2", "slowdwon = 2")
    with pytest.raises(InputError) as caught:
        Fleet.from_toml(text)
    assert len(str(caught.value).splitlines()) == 2


def test_values_made_in_python_are_checked_too() -> None:
    with pytest.raises(InputError, match="cores = -1 of device 'x'"):
        Device("x", "here", "cpu", cores=-1)
    with pytest.raises(InputError, match="0 devices"):
        Fleet((Host("here"),), ())
    two = (Host("a"), Host("b")), (Device("a0", "a", "cpu"), Device("b0", "b", "cpu"))
    with pytest.raises(InputError, match=r"host\[0\] 'a' has no NIC: with 2 hosts"):
        Fleet(*two)
    link = Link("a", "b", 1e6, 0)
    with pytest.raises(InputError, match=r"link\[1\] 'a to b' exists twice"):
        Fleet(*two, network=Nic(1e6, 1e6, 0), links=(link, link))


def test_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(
        InputError,
        match=r"cannot read the fleet .*nowhere\.toml: No such file or directory; give the path of a TOML file",
    ):
        read_fleet(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("name", "cores", "bytes_per_s"),
    [
        ("even4", (0.45, 0.45, 0.45, 0.45), 125e6),
        ("mixed4", (0.8, 0.5, 0.3, 0.2), 125e6),
        ("desktop4", (0.8, 0.5, 0.3, 0.2), 12.5e6),
        ("straggler2", (1.0, 0.25), 125e6),
        ("many8", (0.35, 0.35, 0.25, 0.25, 0.12, 0.12, 0.08, 0.08), 125e6),
    ],
)
def test_benchmark_fleet_files_load(name: str, cores: tuple[float, ...], bytes_per_s: float) -> None:
    fleet = read_fleet(FLEETS / f"{name}.toml")
    assert tuple(device.cores for device in fleet.devices) == cores
    assert math.fsum(cores) <= 1.8, "two cores carry no more than this"
    assert [device.host for device in fleet.devices] == [host.name for host in fleet.hosts]
    for host in fleet.hosts:
        card = fleet.nic(host.name)
        assert (card.send_bytes_per_s, card.receive_bytes_per_s) == (bytes_per_s, bytes_per_s)


def test_error_list_stops_at_twenty() -> None:
    """Regression: one misspelt word in every row of a file gave an error of 24,552 characters."""
    rows = "".join(f'[[host]]\nnme = "h{n}"\n' for n in range(1000))
    with pytest.raises(InputError) as error:
        Fleet.from_toml(rows)
    lines = str(error.value).splitlines()
    assert len(lines) <= 22
    assert lines[-1].endswith("more like these")
