"""Energy from powercap, on copies of the kernel's file tree."""

from pathlib import Path

import pytest

from fedbudget.resources.rapl import Rapl
from fedbudget.resources.resource import MeterError

RANGE = 262_143_328_850  # of a real processor


def zone(
    root: Path, folder: str, name: str, microjoules: int | str, limit: int | str = RANGE
) -> Path:
    """Create a zone of powercap and return its counter."""
    path = root / folder
    path.mkdir(parents=True)
    (path / "name").write_text(f"{name}\n")
    (path / "max_energy_range_uj").write_text(f"{limit}\n")
    counter = path / "energy_uj"
    counter.write_text(f"{microjoules}\n")
    return counter


def rapl_of(root: Path) -> Rapl:
    rapl = Rapl.find(root)
    assert rapl is not None
    return rapl


def error_of(root: Path) -> str:
    assert Rapl.find(root) is None
    with pytest.raises(MeterError) as error:
        Rapl(root)
    return str(error.value)


class TestCounting:
    def test_joules_since_creation(self, tmp_path: Path) -> None:
        counter = zone(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
        rapl = rapl_of(tmp_path)
        assert rapl.read() == 0
        counter.write_text("7500000\n")
        assert rapl.read() == rapl.read() == 2.5
        counter.write_text("8000000\n")
        assert rapl.read() == 3.0

    def test_counter_overflow(self, tmp_path: Path) -> None:
        counter = zone(tmp_path, "intel-rapl:0", "package-0", 9_000_000, limit=10_000_000)
        rapl = rapl_of(tmp_path)
        readings = []
        for microjoules in (9_500_000, 500_000, 400_000, 10_000_000, 0):
            counter.write_text(str(microjoules))
            readings.append(rapl.read())
        # + 0.5; + 1 across the end; + 9.9 across the end; + 9.6; the end equals the start.
        assert readings == pytest.approx([0.5, 1.5, 11.4, 21.0, 21.0])

    def test_packages_are_summed(self, tmp_path: Path) -> None:
        one = zone(tmp_path, "intel-rapl:0", "package-0", 1_000_000, limit=4_000_000)
        other = zone(tmp_path, "intel-rapl:1", "package-1", 6_000_000, limit=8_000_000)
        tenth = zone(tmp_path, "intel-rapl:10", "package-10-die-0", 0)
        rapl = rapl_of(tmp_path)
        one.write_text("3000000")  # 2 more
        other.write_text("1000000")  # 3 more, over its end
        tenth.write_text("250000")  # 0.25 more
        assert rapl.read() == 5.25

    def test_nested_zones_are_skipped(self, tmp_path: Path) -> None:
        package = zone(tmp_path, "intel-rapl:0", "package-0", 0)
        others = [
            zone(tmp_path, "intel-rapl:0:0", "core", 0),
            zone(tmp_path, "intel-rapl:0:1", "dram", 0),
            zone(tmp_path, "intel-rapl:0/intel-rapl:0:0", "core", 0),
            zone(tmp_path, "intel-rapl:1", "psys", 0),
            zone(tmp_path, "intel-rapl-mmio:0", "package-0", 0),  # the same package
        ]
        (tmp_path / "intel-rapl").mkdir()
        rapl = rapl_of(tmp_path)
        for counter in others:
            counter.write_text("7000000")
        assert rapl.read() == 0
        package.write_text("1000000")
        assert rapl.read() == 1


class TestFailures:
    def test_failed_read_loses_nothing(self, tmp_path: Path) -> None:
        counter = zone(tmp_path, "intel-rapl:0", "package-0", 0)
        later = zone(tmp_path, "intel-rapl:1", "package-1", 0)
        rapl = rapl_of(tmp_path)
        counter.write_text("1000000")
        later.unlink()
        with pytest.raises(
            MeterError, match=r"intel-rapl:1/energy_uj cannot be read: No such file"
        ):
            rapl.read()
        later.write_text("2000000")
        assert rapl.read() == 3

    @pytest.mark.parametrize("text", ["", "garbage", "-5", "1.5", "1e6", "12 13", "\xff"])
    def test_invalid_numbers(self, tmp_path: Path, text: str) -> None:
        counter = zone(tmp_path, "intel-rapl:0", "package-0", 0)
        rapl = rapl_of(tmp_path)
        counter.write_text(text, "latin-1")
        with pytest.raises(MeterError, match="not a number of microjoules"):
            rapl.read()
        assert "not a number of microjoules" in error_of(tmp_path)

    def test_value_above_the_range(self, tmp_path: Path) -> None:
        counter = zone(tmp_path, "intel-rapl:0", "package-0", 0, limit=1000)
        rapl = rapl_of(tmp_path)
        counter.write_text("1001")
        with pytest.raises(MeterError, match="1001, more than its maximum of 1000"):
            rapl.read()

    def test_missing_counter(self, tmp_path: Path) -> None:
        zone(tmp_path, "intel-rapl:0", "package-0", 0).unlink()
        assert "energy_uj cannot be read: No such file" in error_of(tmp_path)

    def test_one_unreadable_package_disables_rapl(self, tmp_path: Path) -> None:
        zone(tmp_path, "intel-rapl:0", "package-0", 0)
        counter = zone(tmp_path, "intel-rapl:1", "package-1", 0)
        counter.unlink()
        counter.mkdir()  # unreadable even for root
        assert "intel-rapl:1/energy_uj cannot be read: Is a directory" in error_of(tmp_path)

    def test_counter_for_root_only(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Tests may run as root, so the error is simulated."""
        zone(tmp_path, "intel-rapl:0", "package-0", 0)
        read = Path.read_text

        def guarded(path: Path, *args: str, **options: str) -> str:
            if path.name == "energy_uj":
                raise PermissionError(13, "Permission denied")
            return read(path, *args, **options)

        monkeypatch.setattr(Path, "read_text", guarded)
        assert "energy_uj is readable by root only" in error_of(tmp_path)

    def test_machine_without_powercap(self, tmp_path: Path) -> None:
        assert error_of(tmp_path / "powercap") == "this machine has no powercap"

    def test_powercap_without_packages(self, tmp_path: Path) -> None:
        assert "no processor's energy" in error_of(tmp_path)
        zone(tmp_path, "intel-rapl:0", "psys", 0)
        assert "no processor's energy" in error_of(tmp_path)


def test_host_is_an_anonymous_hash(
    tmp_path: Path,
) -> None:
    zone(tmp_path / "one", "intel-rapl:0", "package-0", 0)
    zone(tmp_path / "other", "intel-rapl:0", "package-0", 0)
    hosts = {rapl_of(tmp_path / folder).host for folder in ("one", "other")}
    assert len(hosts) == 1
    assert all(len(host) == 16 and int(host, 16) >= 0 for host in hosts)


def test_rapl_of_this_machine() -> None:
    rapl = Rapl.find()
    if rapl is None:
        with pytest.raises(MeterError, match=r"powercap|readable by root"):
            Rapl()
    else:
        earlier = rapl.read()
        sum(number * number for number in range(1_000_000))
        assert rapl.read() >= earlier >= 0
