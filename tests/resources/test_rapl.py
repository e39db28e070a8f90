"""Energy from powercap, on trees of files that are made like the kernel's."""

from pathlib import Path

import pytest

from fedbudget.resources.rapl import Rapl
from fedbudget.resources.resource import MeterError

RANGE = 262_143_328_850  # of a real processor


def zone(
    root: Path, folder: str, name: str, microjoules: int | str, limit: int | str = RANGE
) -> Path:
    """A zone of powercap; its counter."""
    path = root / folder
    path.mkdir(parents=True)
    (path / "name").write_text(f"{name}\n")
    (path / "max_energy_range_uj").write_text(f"{limit}\n")
    counter = path / "energy_uj"
    counter.write_text(f"{microjoules}\n")
    return counter


def found(root: Path) -> Rapl:
    rapl = Rapl.find(root)
    assert rapl is not None
    return rapl


def refused(root: Path) -> str:
    assert Rapl.find(root) is None
    with pytest.raises(MeterError) as error:
        Rapl(root)
    return str(error.value)


class TestCounting:
    def test_joules_count_from_when_it_was_made(self, tmp_path: Path) -> None:
        counter = zone(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
        rapl = found(tmp_path)
        assert rapl.read() == 0
        counter.write_text("7500000\n")
        assert rapl.read() == rapl.read() == 2.5
        counter.write_text("8000000\n")
        assert rapl.read() == 3.0

    def test_a_counter_that_starts_again_goes_on(self, tmp_path: Path) -> None:
        counter = zone(tmp_path, "intel-rapl:0", "package-0", 9_000_000, limit=10_000_000)
        rapl = found(tmp_path)
        seen = []
        for microjoules in (9_500_000, 500_000, 400_000, 10_000_000, 0):
            counter.write_text(str(microjoules))
            seen.append(rapl.read())
        # 0.5; 1 more to 0.5 over the end; 9.9 more to just before it; 9.6 more to the end,
        # which is the start.
        assert seen == pytest.approx([0.5, 1.5, 11.4, 21.0, 21.0])

    def test_packages_add_up_and_each_starts_again_by_itself(self, tmp_path: Path) -> None:
        one = zone(tmp_path, "intel-rapl:0", "package-0", 1_000_000, limit=4_000_000)
        other = zone(tmp_path, "intel-rapl:1", "package-1", 6_000_000, limit=8_000_000)
        tenth = zone(tmp_path, "intel-rapl:10", "package-10-die-0", 0)
        rapl = found(tmp_path)
        one.write_text("3000000")  # 2 more
        other.write_text("1000000")  # 3 more, over its end
        tenth.write_text("250000")  # 0.25 more
        assert rapl.read() == 5.25

    def test_what_is_part_of_a_package_or_has_it_in_it_is_not_added(
        self, tmp_path: Path
    ) -> None:
        package = zone(tmp_path, "intel-rapl:0", "package-0", 0)
        besides = [
            zone(tmp_path, "intel-rapl:0:0", "core", 0),
            zone(tmp_path, "intel-rapl:0:1", "dram", 0),
            zone(tmp_path, "intel-rapl:0/intel-rapl:0:0", "core", 0),
            zone(tmp_path, "intel-rapl:1", "psys", 0),
            zone(
                tmp_path, "intel-rapl-mmio:0", "package-0", 0
            ),  # the same package, seen another way
        ]
        (tmp_path / "intel-rapl").mkdir()
        rapl = found(tmp_path)
        for counter in besides:
            counter.write_text("7000000")
        assert rapl.read() == 0
        package.write_text("1000000")
        assert rapl.read() == 1


class TestFailures:
    def test_a_read_that_fails_is_an_error_and_loses_nothing(self, tmp_path: Path) -> None:
        counter = zone(tmp_path, "intel-rapl:0", "package-0", 0)
        later = zone(tmp_path, "intel-rapl:1", "package-1", 0)
        rapl = found(tmp_path)
        counter.write_text("1000000")
        later.unlink()
        with pytest.raises(
            MeterError, match=r"intel-rapl:1/energy_uj cannot be read: No such file"
        ):
            rapl.read()
        later.write_text("2000000")
        assert rapl.read() == 3

    @pytest.mark.parametrize("text", ["", "garbage", "-5", "1.5", "1e6", "12 13", "\xff"])
    def test_what_is_no_number_is_an_error(self, tmp_path: Path, text: str) -> None:
        counter = zone(tmp_path, "intel-rapl:0", "package-0", 0)
        rapl = found(tmp_path)
        counter.write_text(text, "latin-1")
        with pytest.raises(MeterError, match="not a number of microjoules"):
            rapl.read()
        assert "not a number of microjoules" in refused(tmp_path)

    def test_more_than_a_counter_counts_to_is_an_error(self, tmp_path: Path) -> None:
        counter = zone(tmp_path, "intel-rapl:0", "package-0", 0, limit=1000)
        rapl = found(tmp_path)
        counter.write_text("1001")
        with pytest.raises(
            MeterError, match="1001, more than its maximum of 1000"
        ):
            rapl.read()

    def test_a_counter_may_be_gone_from_the_start(self, tmp_path: Path) -> None:
        zone(tmp_path, "intel-rapl:0", "package-0", 0).unlink()
        assert "energy_uj cannot be read: No such file" in refused(tmp_path)

    def test_one_package_that_cannot_be_read_is_enough_to_have_none(
        self, tmp_path: Path
    ) -> None:
        zone(tmp_path, "intel-rapl:0", "package-0", 0)
        counter = zone(tmp_path, "intel-rapl:1", "package-1", 0)
        counter.unlink()
        counter.mkdir()  # which not even root can read
        assert "intel-rapl:1/energy_uj cannot be read: Is a directory" in refused(tmp_path)

    def test_a_counter_that_root_keeps_to_itself_says_so(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Tests may run as root, who can read anything, so the refusal is made up."""
        zone(tmp_path, "intel-rapl:0", "package-0", 0)
        read = Path.read_text

        def guarded(path: Path, *args: str, **options: str) -> str:
            if path.name == "energy_uj":
                raise PermissionError(13, "Permission denied")
            return read(path, *args, **options)

        monkeypatch.setattr(Path, "read_text", guarded)
        assert "energy_uj is readable by root only" in refused(tmp_path)

    def test_a_machine_without_powercap_says_so(self, tmp_path: Path) -> None:
        assert refused(tmp_path / "powercap") == "this machine has no powercap"

    def test_a_powercap_without_packages_says_so(self, tmp_path: Path) -> None:
        assert "no processor's energy" in refused(tmp_path)
        zone(tmp_path, "intel-rapl:0", "psys", 0)
        assert "no processor's energy" in refused(tmp_path)


def test_all_on_one_machine_have_the_same_host_which_does_not_name_it(
    tmp_path: Path,
) -> None:
    zone(tmp_path / "one", "intel-rapl:0", "package-0", 0)
    zone(tmp_path / "other", "intel-rapl:0", "package-0", 0)
    hosts = {found(tmp_path / folder).host for folder in ("one", "other")}
    assert len(hosts) == 1
    assert all(len(host) == 16 and int(host, 16) >= 0 for host in hosts)


def test_this_machine_has_one_that_counts_or_says_why_not() -> None:
    rapl = Rapl.find()
    if rapl is None:
        with pytest.raises(MeterError, match=r"powercap|readable by root"):
            Rapl()
    else:
        earlier = rapl.read()
        sum(number * number for number in range(1_000_000))
        assert rapl.read() >= earlier >= 0
