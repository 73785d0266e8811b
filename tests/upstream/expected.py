"""Lightning's tests that end otherwise with `HeteroDDPStrategy`, and why that is as it should be.

A test that is here and no longer differs fails `make test-upstream`, as does one that differs and is not here.
"""

_SPIKE = "callbacks/test_spike.py::test_trainer_spike_detection_integration"
_UNUSED = "strategies/test_ddp_integration.py::test_find_unused_parameters_ddp"
_DDP = "strategies/test_ddp.py"

_BY_REASON: dict[str, tuple[str, ...]] = {
    "A loss that is not finite is an error on every rank before the optimizer steps, so before the callback sees it; "
    "with on_nan='ignore' the callback does.": tuple(
        f"{_SPIKE}[{rank_and_world}-{loss}-{finite_only}]"
        for rank_and_world in ("0-1", "0-2", "1-2")
        for loss in ("inf", "-inf", "nan")
        for finite_only in (True, False)
    ),
    "A replica of one rank is not wrapped in DistributedDataParallel, so parameters without a gradient are no error.": (
        f"{_UNUSED}_spawn_raises",
        f"{_UNUSED}_exception",
    ),
    "The test asserts that the model of one rank is a DistributedDataParallel; ours has nobody to average with.": (
        f"{_DDP}::test_ddp_configure_ddp",
    ),
    "process_group_backend is not a choice: all ranks meet over gloo, groups of GPUs exchange gradients over NCCL.": (
        f"{_DDP}::test_ddp_process_group_backend[foo-cpu-foo]",
        f"{_DDP}::test_ddp_process_group_backend[foo-cuda:0-foo]",
        f"{_DDP}::test_ddp_process_group_backend[None-cuda:0-nccl]",
    ),
    "The test replaces init_process_group by a mock, but ours meets the other ranks right after it.": (
        f"{_DDP}::test_set_timeout",
        f"{_DDP}::test_device_id_passed_for_cuda_devices_pytorch",
    ),
}

_BY_REASON_EVERYWHERE: dict[str, tuple[str, ...]] = {}

#: The reason, by test.
EXPECTED = {test: reason for reason, tests in _BY_REASON.items() for test in tests}
#: Further ones where `ddp` runs on one device, too.
EXPECTED_EVERYWHERE = {test: reason for reason, tests in _BY_REASON_EVERYWHERE.items() for test in tests}
