"""Lightning's tests that end otherwise with `HeteroDDPStrategy`, with the reason for each.

`make test-upstream` fails if a test in this list no longer differs, or if one that differs is not in it.
"""

_SPIKE = "callbacks/test_spike.py::test_trainer_spike_detection_integration"
_UNUSED = "strategies/test_ddp_integration.py::test_find_unused_parameters_ddp"
_DDP = "strategies/test_ddp.py"
_SHARDED = "strategies/test_model_parallel_integration.py"
_PARALLEL = "strategies/test_model_parallel.py"

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
    "A spawned rank imports the test's file without this plugin: there, its strategy is a subclass of Lightning's "
    "DDPStrategy again, but what was sent to it is a HeteroDDPStrategy.": (
        "strategies/test_ddp_integration.py::test_ddp_spawn_add_get_queue",
    ),
    "The test replaces init_process_group by a mock, but ours meets the other ranks right after it.": (
        f"{_DDP}::test_set_timeout",
        f"{_DDP}::test_device_id_passed_for_cuda_devices_pytorch",
    ),
    "With save_distributed_checkpoint=False theirs gathers the whole model on rank 0 when it is asked for its state; "
    "ours gives each rank its shards, and gathers one tensor after the other where the file is written.": (
        f"{_SHARDED}::test_strategy_state_dict[False]",
        f"{_SHARDED}::test_load_full_state_checkpoint_into_regular_model",
        f"{_SHARDED}::test_load_standard_checkpoint_into_distributed_model",
    ),
    "The test calls a method of ModelParallelStrategy on mocks, without ranks that have met, or asks for its message "
    "or warning; ours is a DDPStrategy, whose ranks make the mesh when they have met.": (
        f"{_PARALLEL}::test_torch_greater_equal_2_4",
        f"{_PARALLEL}::test_device_mesh_access",
        *(
            f"{_PARALLEL}::test_validate_device_mesh_dimensions[{sizes}]"
            for sizes in ("1-4-1-1", "1-4-2-3", "1-4-4-2", "2-4-1-4", "2-4-2-1")
        ),
        f"{_PARALLEL}::test_fsdp_v1_modules_unsupported",
        f"{_PARALLEL}::test_configure_model_required",
        f"{_PARALLEL}::test_save_checkpoint_storage_options",
        f"{_PARALLEL}::test_save_checkpoint_path_exists",
        f"{_PARALLEL}::test_load_unknown_checkpoint_type",
        f"{_PARALLEL}::test_set_timeout",
        f"{_PARALLEL}::test_meta_device_materialization",
    ),
}

_FETCHERS = "loops/test_fetchers.py"
_LOOPS = "loops/test_loops.py"
_RESTORE = "models/test_restore.py"
_SCALAR = "loops/test_training_loop_flow_scalar.py"
_DATALOADERS = f"{_LOOPS}::test_fit_loop_save_and_restore_dataloaders"

_BY_REASON_EVERYWHERE: dict[str, tuple[str, ...]] = {
    "training_step(dataloader_iter) is refused: the weights of the batches would be unknown.": (
        *(f"{_FETCHERS}::test_fetching_dataloader_iter_opt[{value}]" for value in (True, False)),
        f"{_FETCHERS}::test_training_step_with_dataloader_iter",
        *(
            f"{_FETCHERS}::test_step_methods_with_dataloader_iter[{'-'.join([n] * 3)}]"
            for n in ("None", "0", "2", "100")
        ),
        *(f"{_FETCHERS}::test_stop_iteration_with_dataloader_iter[{value}]" for value in (True, False)),
        f"{_FETCHERS}::test_fetching_is_profiled",
        "loops/test_training_epoch_loop.py::test_training_loop_dataloader_iter_multiple_dataloaders",
    ),
    "The test calls parts of the loop by hand once the fit is over; without a batch a gradient has no weight.": (
        "loops/test_evaluation_loop_flow.py::test__eval_step__flow",
        f"{_SCALAR}::test__training_step__epoch_end__flow_scalar",
        f"{_SCALAR}::test_training_step_no_return_when_even",
    ),
    "The test asks the loop for the loaders' states; ours is empty, and the position is saved elsewhere.": tuple(
        f"{_LOOPS}::test_loop_state_on_exception[{epochs}-{batch}-{batches}]"
        for epochs in (1, 2)
        for batch in (1, 2)
        for batches in (1, 2, 3)
    ),
    "Batches of no tensors have no size that one could see; the error says so and asks for batch_weight.": (
        f"{_DATALOADERS}[<lambda>-True-batches_before1-batches_after1]",
        f"{_DATALOADERS}[<lambda>-False-batches_before2-batches_after2]",
        f"{_DATALOADERS}[<lambda>-True-batches_before3-batches_after3]",
        f"{_DATALOADERS}[<lambda>-True-batches_before4-batches_after4]",
        f"{_DATALOADERS}[<lambda>-True-batches_before5-batches_after5]",
    ),
    "A Trainer that has fitted keeps its loaders; ours refer to the job and cannot be pickled (copy.deepcopy works).": (
        "checkpointing/test_torch_saving.py::test_model_torch_save",
        "callbacks/progress/test_rich_progress_bar.py::test_rich_progress_bar_can_be_pickled",
        "callbacks/progress/test_tqdm_progress_bar.py::test_tqdm_progress_bar_can_be_pickled",
    ),
    "The fit goes on at the batch at which it stopped, so there is nothing to warn of.": (
        f"{_RESTORE}::test_restarting_mid_epoch_raises_warning[ExceptionModel-True]",
        f"{_RESTORE}::test_restarting_mid_epoch_raises_warning[ShouldStopModel-True]",
    ),
    "Fails with Lightning's, passes with ours: a replica of one rank has no DistributedDataParallel that could miss "
    "gradients.": (
        f"{_RESTORE}::test_strict_model_load_more_params[True]",
        f"{_RESTORE}::test_strict_model_load_more_params[False]",
    ),
}

#: The reason, by test.
EXPECTED = {test: reason for reason, tests in _BY_REASON.items() for test in tests}
#: Further tests, if `ddp` runs on one device, too.
EXPECTED_EVERYWHERE = {test: reason for reason, tests in _BY_REASON_EVERYWHERE.items() for test in tests}
