"""What megappo promises about faults and hostile input, row by row of its specification, and the tests that hold it to that.

A row names the tests (`file::function`), the measured figure, or why nothing covers it. `{name}` in a figure is one of
docs/reliability.json, which `benchmarks/bench_reliability.py` writes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Promise:
    """key: R, F, P or S and a number. text: the promise. not_covered: the part that nothing tests, and why."""

    key: str
    text: str
    tests: tuple[str, ...] = ()
    figure: str = ""
    not_covered: str = ""


PROMISES = (
    Promise(
        "R1",
        "A resumed run has the bits of one that was not stopped: weights, optimizer, random states, cursor, KL, metrics",
        (
            "tests/checkpoint/test_store.py::test_three_and_three_steps_equal_six_bit_for_bit",
            "tests/checkpoint/test_store.py::test_the_comparison_notices_what_is_not_restored",
            "tests/trainer/test_resume.py::test_metrics_of_every_step_are_equal_to_the_last_bit",
            "tests/trainer/test_resume.py::test_weights_optimizer_state_and_components_are_equal_to_the_last_bit",
        ),
    ),
    Promise(
        "R2",
        "A run resumed inside an epoch takes the prompts that follow, also a second time; none that is in flight is lost",
        (
            "tests/trainer/test_recipes.py::test_a_resumed_run_takes_the_prompts_that_follow",
            "tests/trainer/test_asynchronous.py::test_a_resume_on_the_events_of_a_run_is_that_run",
            "tests/trainer/test_asynchronous.py::test_killed_ranks_of_both_halves_lose_no_prompt_and_none_trains_twice",
            "tests/trainer/test_asynchronous.py::test_a_checkpoint_of_the_cursor_alone_loses_prompts_and_the_ledger_says_so",
            "tests/benchmarks/test_chaos.py::test_a_run_under_faults_ends_with_the_bits_of_a_clean_one",
        ),
    ),
    Promise(
        "R3",
        "The same command twice gives the same bits",
        ("tests/benchmarks/test_chaos.py::test_a_run_under_faults_ends_with_the_bits_of_a_clean_one",),
        "{all_compared}",
        "GPUs",
    ),
    Promise(
        "R4",
        "Loss, gradients and weights do not depend on the layout",
        (
            "tests/parity/test_layouts.py::test_every_layout_gives_the_numbers_of_one_rank",
            "tests/parity/test_replay.py::test_parameters_after_all_steps_are_those_of_one_rank",
        ),
        "[parity](parity.md)",
        "bf16 on GPUs",
    ),
    Promise(
        "R5",
        "A checkpoint loads in any other layout, bit for bit",
        (
            "tests/checkpoint/test_resharding.py::test_weights_and_optimizer_survive_a_chain_of_layouts",
            "tests/checkpoint/test_spread.py::test_another_layout_and_the_same_one_read_it_to_the_bit",
        ),
    ),
    Promise(
        "R6",
        "The reference of a resumed run is the one that it started with; the KL goes on to the bit",
        (
            "tests/trainer/test_resume.py::test_metrics_of_every_step_are_equal_to_the_last_bit",
            "tests/checkpoint/test_store.py::test_only_what_must_match_is_compared",
        ),
    ),
    Promise(
        "R7",
        "The first mini-batch after a resume has the ratio of the run that was not stopped",
        (
            "tests/trainer/test_checkpoints.py::test_the_first_step_after_a_resume_has_the_ratios_and_the_kl_of_the_run_that_was_not_stopped",
            "tests/parity/test_replay.py::test_the_first_mini_batch_of_a_step_has_a_ratio_of_one",
        ),
    ),
    Promise(
        "F1",
        "A rank that is killed costs a restart of all ranks from the newest valid checkpoint: noticed in 2 s, next step in 30 s",
        (
            "tests/commands/launch/test_training.py::test_a_killed_rank_is_noticed_in_two_seconds_and_the_next_step_is_done_in_thirty",
            "tests/commands/launch/test_training.py::test_the_end_is_that_of_a_run_without_faults_to_the_last_bit",
            "tests/benchmarks/test_chaos.py::test_a_run_under_faults_ends_with_the_bits_of_a_clean_one",
        ),
        "{kills}",
        "a node with GPUs (120 s)",
    ),
    Promise(
        "F2",
        "The watchdog finds a rank that hangs (SIGSTOP, sleep, held GIL), names its section and last exchange, dumps all "
        "stacks and kills all ranks",
        (
            "tests/runtime/test_watchdog.py::test_every_process_is_gone_in_time_by_sigkill",
            "tests/runtime/test_watchdog.py::test_the_report_names_rank_host_section_and_exchange",
            "tests/runtime/test_watchdog.py::test_the_stacks_of_all_ranks_are_left",
            "tests/runtime/test_watchdog.py::test_a_slow_rank_ends_nobody",
            "tests/commands/launch/test_training.py::test_a_rank_that_is_stopped_is_named_and_the_run_goes_on",
        ),
        "{stop_times}",
    ),
    Promise(
        "F3",
        "An exception on one rank ends all, and its traceback is the first that is printed",
        (
            "tests/runtime/test_failure.py::test_the_rank_that_failed_first_is_found",
            "tests/commands/launch/test_local.py::test_the_first_failure_ends_the_world_and_names_the_code",
            "tests/checkpoint/test_store.py::test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_nothing",
            "tests/commands/launch/test_training.py::test_no_rank_outlives_one_that_raises_and_its_traceback_comes_first",
        ),
        "{raise_times}",
    ),
    Promise(
        "F4",
        "Ranks that would run different schedules are refused before the pass, with every rank's counts",
        (
            "tests/engine/test_schedule_agreement.py::test_a_rank_at_another_point_is_named_on_all_ranks",
            "tests/engine/test_schedule_agreement.py::test_ranks_that_agree_pass",
        ),
    ),
    Promise(
        "F5",
        "A kill at any moment of a save leaves a valid newest checkpoint",
        (
            "tests/checkpoint/test_directory.py::test_a_sigkill_at_any_of_20_offsets_of_a_save_leaves_a_valid_newest",
            "tests/checkpoint/test_directory.py::test_a_kill_at_any_moment_leaves_a_valid_newest",
            "tests/checkpoint/test_asynchronous.py::test_a_kill_of_all_ranks_costs_at_most_the_save_in_flight",
        ),
        "20 of 20 offsets",
    ),
    Promise(
        "F6",
        "Damage (flipped bit, truncation, zeros, a missing file) is found before a tensor is used, and the checkpoint before is "
        "loaded; what cannot be read is no damage and stays",
        (
            "tests/checkpoint/test_store.py::test_damage_is_found_before_anything_is_opened",
            "tests/checkpoint/test_store.py::test_damage_found_while_models_are_built_is_told_before_a_tensor_changes",
            "tests/checkpoint/test_store.py::test_without_hashes_a_flipped_bit_is_loaded",
            "tests/checkpoint/test_manifest.py::test_every_changed_or_missing_file_is_damage",
            "tests/checkpoint/test_store.py::test_an_io_error_on_one_rank_refuses_on_all_and_touches_nothing",
        ),
        "{corrupt_times}; {verify}",
    ),
    Promise(
        "F7",
        "A full disk on one rank fails the save on all, and training goes on; the third in a row ends the run; earlier checkpoints "
        "stay as they were",
        (
            "tests/trainer/test_checkpoints.py::test_training_goes_on_while_a_disk_is_full",
            "tests/trainer/test_checkpoints.py::test_a_third_failure_in_a_row_ends_the_run_everywhere",
            "tests/checkpoint/test_directory.py::test_a_full_disk_is_noticed_before_writing",
        ),
        "{full_times}",
    ),
    Promise(
        "F8",
        "Retention never removes the newest valid checkpoint",
        (
            "tests/checkpoint/test_directory.py::test_retention_counts_numerically_and_skips_damaged",
            "tests/checkpoint/test_directory.py::test_a_stale_higher_step_does_not_remove_the_new_one",
            "tests/checkpoint/test_store.py::test_the_newest_are_kept_in_numeric_order",
        ),
    ),
    Promise(
        "F9",
        "A NaN in the gradients of one rank skips the update on all; three in a row end the run with exit code 17; no checkpoint "
        "with a value that is not finite is ever completed",
        (
            "tests/engine/test_megatron.py::test_a_non_finite_gradient_is_skipped_everywhere_and_the_third_stops",
            "tests/engine/test_megatron.py::test_a_non_finite_gradient_on_one_rank_stops_them_all_and_is_named_first",
            "tests/commands/test_cli.py::test_a_fault_that_would_come_back_has_a_code_of_its_own",
            "tests/trainer/test_checkpoints.py::test_a_nan_of_a_model_names_tensor_role_rank_and_stage",
            "tests/trainer/test_checkpoints.py::test_a_nan_in_a_reward_names_rule_and_sample_on_all_ranks",
            "tests/trainer/test_checkpoints.py::test_what_is_not_finite_is_not_saved",
            "tests/trainer/test_checkpoints.py::test_a_resume_falls_back_to_a_checkpoint_that_is_finite",
        ),
        "{nan_times}",
    ),
    Promise(
        "F10",
        "SIGTERM and SIGUSR1, also to one rank only, stop all ranks after the same step, with a checkpoint",
        (
            "tests/runtime/test_signals.py::test_all_ranks_stop_at_the_step_at_which_one_was_asked_to",
            "tests/trainer/test_checkpoints.py::test_a_stop_on_one_rank_stops_all_with_a_checkpoint",
            "tests/commands/launch/test_training.py::test_a_request_to_stop_of_the_whole_process_group_saves_also_with_helpers",
            "tests/commands/launch/test_local.py::test_a_second_request_ends_at_once",
            "tests/commands/launch/test_training.py::test_a_second_request_during_the_save_ends_at_once_and_harms_nothing",
            "tests/trainer/test_checkpoints.py::test_requests_in_every_phase_of_a_step_stop_all_ranks_at_its_end",
            "tests/commands/launch/test_ppo_on_slurm.py::test_the_signal_saves_at_a_step_boundary_and_the_requeued_job_resumes_there",
        ),
    ),
    Promise(
        "F11",
        "A run under random faults ends with the bits of a clean one",
        (
            "tests/benchmarks/test_chaos.py::test_a_run_under_faults_ends_with_the_bits_of_a_clean_one",
            "tests/benchmarks/test_chaos.py::test_a_tensor_that_differs_by_its_last_bit_is_named",
        ),
        "{all}",
    ),
    Promise(
        "F12",
        "A checkpoint from which three starts fail is passed over; after six starts without progress the run is given up",
        (
            "tests/commands/launch/test_restart.py::test_the_next_attempt_starts_where_it_may_get_on",
            "tests/commands/launch/test_restart.py::test_a_run_without_progress_is_given_up_after_six_attempts_at_most",
            "tests/commands/launch/test_training.py::test_a_run_gets_over_its_faults_and_is_restarted_from_its_newest_checkpoint",
        ),
    ),
    Promise(
        "F13",
        "Data that is empty or too short is refused before a model is built",
        (
            "tests/test_bad_input.py::test_train_refuses_what_its_keys_name",
            "tests/test_bad_input.py::test_data_that_is_too_short_is_refused_within_a_second",
            "tests/trainer/test_advantages_and_updates.py::test_a_step_without_a_sampled_token_is_zero_and_not_nan",
        ),
    ),
    Promise(
        "F14",
        "A weight that differs between replicas is found at the next check, with its name and its rank",
        (
            "tests/trainer/test_replicas.py::test_one_bit_is_found_and_named_alike_on_every_rank",
            "tests/trainer/test_replicas.py::test_weights_that_have_no_other_copy_are_not_compared",
        ),
        "[what it costs](#how-it-was-measured)",
    ),
    Promise(
        "F15",
        "Saves in the background hold the state of the call to the bit, whatever training does meanwhile; the last is never lost",
        (
            "tests/checkpoint/test_asynchronous.py::test_a_snapshot_is_the_state_at_the_call",
            "tests/checkpoint/test_asynchronous.py::test_training_waits_for_a_copy_that_is_not_made_yet",
            "tests/checkpoint/test_asynchronous.py::test_whatever_changes_in_a_state_is_in_its_checkpoint",
            "tests/checkpoint/test_asynchronous.py::test_a_fault_in_the_background_fails_the_save_on_all_ranks_and_leaves_nothing",
            "tests/checkpoint/test_background.py::test_a_killed_writer_is_an_error_and_is_replaced",
            "tests/trainer/test_checkpoints.py::test_it_is_drained_before_the_next_and_before_the_end",
        ),
        "[the first table](#a-run-that-survives)",
    ),
    Promise(
        "F16",
        "A remote reward that fails is asked again up to a budget, then its samples have no verdict; too many of them end the run "
        "with a checkpoint, nonsense at once; no sample scores 0 in silence",
        (
            "tests/rewards/test_remote.py::test_a_passing_fault_costs_a_retry_and_no_score",
            "tests/rewards/test_remote.py::test_a_lasting_fault_leaves_no_verdict_at_the_budget",
            "tests/rewards/test_remote.py::test_a_server_that_is_down_costs_one_budget_for_all_that_wait",
            "tests/trainer/test_left_out.py::test_too_many_end_the_run_with_one_line_and_a_checkpoint",
            "tests/rewards/test_remote.py::test_a_wrong_answer_ends_the_run_at_once",
            "tests/rewards/test_remote_ranks.py::test_all_ranks_fail_together_with_one_message",
        ),
    ),
    Promise(
        "F17",
        "A failure of the log (full disk, dead writer, closed console) does not end training",
        (
            "tests/trainer/test_side_work.py::test_a_full_disk_loses_records_and_nothing_of_the_training",
            "tests/rollout/test_server.py::test_a_log_on_a_full_disk_ends_no_run",
            "tests/telemetry/test_side_work.py::test_tensorboard_goes_on_in_a_new_file_after_the_death_of_its_writer",
            "tests/commands/launch/test_training.py::test_training_goes_on_where_nobody_reads_its_console",
        ),
    ),
    Promise("P1", "Stall of a save, rate of saves and loads on one H200", not_covered="no GPU here"),
    Promise("P2", "At least 90 % effective training time at one kill in 5 minutes", (), "{goodput}"),
    Promise(
        "S1",
        "A hostile checkpoint file runs no code",
        (
            "tests/checkpoint/test_store.py::test_a_hostile_file_is_refused_and_runs_nothing",
            "tests/checkpoint/test_shards.py::test_a_mutated_file_is_read_or_refused_and_raises_nothing_else",
        ),
    ),
    Promise(
        "S2",
        "No unsafe load and no pickle in the code outside one file",
        (
            "tests/test_security.py::test_no_module_does_what_is_forbidden",
            "tests/test_security.py::test_the_lint_flags",
        ),
    ),
    Promise(
        "S3",
        "Under a key in the environment, a manifest that is not signed with it is refused",
        (
            "tests/checkpoint/test_manifest.py::test_a_forged_manifest_with_the_right_checksum_is_refused_under_a_key",
            "tests/checkpoint/test_store.py::test_a_signed_checkpoint_is_refused_with_another_key_and_stays",
        ),
    ),
    Promise(
        "S4",
        "A model directory with code of its own is refused, and nothing of it is imported",
        (
            "tests/test_security.py::test_a_checkpoint_with_code_is_refused_and_its_code_does_not_run",
            "tests/test_security.py::test_the_code_of_the_checkpoint_would_run_if_it_were_trusted",
        ),
    ),
    Promise(
        "S5",
        "A YAML file constructs no objects, and its aliases unfold with a bound",
        (
            "tests/config/test_loading.py::test_aliases_cannot_unfold_without_bound",
            "tests/config/test_loading.py::test_mutated_files_load_or_are_refused_in_one_line",
        ),
    ),
    Promise(
        "S6",
        "Data names no code: a reward comes from a table, by the name in the configuration",
        ("tests/rewards/test_rules.py::test_an_unknown_rule_gives_the_nearest_and_the_list",),
    ),
    Promise(
        "S7",
        "Code written by the model reaches no network and no secret, has limits of address space and time, and leaves no process",
        (
            "tests/rewards/test_code_sandbox.py::test_the_network_is_out_of_reach",
            "tests/rewards/test_code_sandbox.py::test_home_and_environment_hold_no_secret",
            "tests/rewards/test_code_sandbox.py::test_a_fork_bomb_is_bounded_and_leaves_nothing",
            "tests/rewards/test_code_sandbox.py::test_ten_gigabytes_are_refused",
            "tests/rewards/test_code_sandbox.py::test_an_endless_program_ends_at_the_limit",
            "tests/rewards/test_code_sandbox.py::test_a_daemon_does_not_survive_its_test",
        ),
    ),
    Promise(
        "S8",
        "A reward server's redirect, endless answer, NaN or wrong number of scores is refused; its token is written nowhere",
        (
            "tests/rewards/test_remote.py::test_a_wrong_answer_ends_the_run_at_once",
            "tests/rewards/test_remote.py::test_a_redirect_is_not_followed_even_to_the_same_host",
            "tests/rewards/test_remote.py::test_the_cap_is_of_bytes_and_has_room_for_a_score_of_every_token",
            "tests/rewards/test_remote.py::test_the_token_is_sent_and_said_nowhere",
        ),
    ),
    Promise(
        "S9",
        "A run's name and paths stay below its output directory; links are not followed",
        (
            "tests/config/test_checks.py::test_a_run_stays_below_its_output_directory",
            "tests/test_security.py::test_a_run_name_with_a_meaning_for_a_shell_is_refused",
            "tests/checkpoint/test_directory.py::test_links_are_neither_checkpoints_nor_followed",
            "tests/checkpoint/test_manifest.py::test_names_that_lead_elsewhere_are_refused",
        ),
    ),
    Promise(
        "S10",
        "Nothing but torch's rendezvous of several machines listens on all interfaces",
        (
            "tests/commands/launch/test_local.py::test_the_store_of_a_world_on_this_machine_listens_to_this_machine",
            "tests/trainer/test_late_ranks.py::test_only_the_rendezvous_listens_on_all_interfaces",
            "tests/trainer/test_resume.py::test_nothing_listens_on_all_interfaces",
        ),
    ),
    Promise(
        "S11",
        "No secret in the files of a run",
        (
            "tests/trainer/test_side_work.py::test_no_secret_is_in_the_run_directory",
            "tests/commands/launch/test_ppo_on_slurm.py::test_a_launch_is_recorded_without_secrets",
            "tests/config/test_redaction.py::test_a_secret_is_hidden",
        ),
    ),
    Promise(
        "S12",
        "No text of the configuration reaches a shell unquoted",
        (
            "tests/commands/launch/test_hostile_values.py::test_a_name_with_a_shells_characters_runs_nothing",
            "tests/commands/launch/test_hostile_values.py::test_a_line_break_in_any_value_is_refused_by_every_template",
            "tests/test_security.py::test_a_run_name_with_a_meaning_for_a_shell_is_refused",
        ),
    ),
)
