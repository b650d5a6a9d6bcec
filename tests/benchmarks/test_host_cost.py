"""The benchmarks of the host's work run. No other test calls them; no time is asserted."""

from benchmarks import admission, host_cost, page_use
from benchmarks.machine import ROOT


def test_every_part_of_a_step_is_measured_and_methods_are_given_back():
    schedule = host_cost.Scheduler.schedule
    records = host_cost.measure(sequences=4, steps=2)
    assert len(records) == 2 and all(
        part in record for record in records for part in host_cost.summary(records)
    )
    assert host_cost.Scheduler.schedule is schedule


def test_admission_is_measured():
    measured = admission.measure(rounds=2)
    assert {*measured["microseconds_a_page"]} >= {"cold: schedule", "hit: schedule"}


def test_bytes_of_a_windowed_sequence_are_those_of_its_windows():
    found = page_use.bytes_at_8k(page_size=16)
    gemma, mistral = found["Gemma 3 1B"], found["Mistral 7B v0.1"]
    # 4 layers of 26 keep 512 pages; 6 groups of 4, padding included, a window and the page that it begins in.
    assert gemma["ratio"] == round((512 + 6 * 36) * 4 / (512 * 26), 3)
    assert 0.5 < mistral["ratio"] < 0.51


def test_slots_without_a_token_are_counted():
    one = page_use.unused_slots(requests=8, max_num_seqs=4)["short: 16-64 in, 16-64 out, pages of 64"]
    assert 0 < one["last pages"] < one["whole length"] < 1


def test_two_checkouts_are_compared():
    compared = host_cost.compare(ROOT, 4, 1)
    assert compared["ratios"].keys() == compared["medians"]["here"].keys() >= {*host_cost.PARTS}
