"""The faults that mutants.py plants, with the test that must catch each."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: in `module`, `find` becomes `put`, and `test` must fail."""

    name: str
    module: str
    find: str
    put: str
    test: str


MUTANTS = (
    Mutant(
        "the partner of an image is off by one pair",
        "data/mixing.py",
        "_blend(first[pair], second[pair], part, dtype)",
        "_blend(first[pair], second[pair - 1], part, dtype)",
        "data/test_mixing.py::test_images_and_labels_are_those_written_by_hand",
    ),
    Mutant(
        "the images of a pair have shares of their own",
        "data/mixing.py",
        "shares.repeat_interleave(2)",
        "shares.repeat(2)",
        "data/test_mixing.py::test_images_and_labels_are_those_written_by_hand",
    ),
    Mutant(
        "the second label is not smoothed",
        "training/losses.py",
        "labels = labels.to(logits.dtype)",
        "labels = labels.to(logits.dtype) / (1 - smoothing * (labels < labels.amax(1, True)))",
        "data/test_mixing.py::test_the_loss_is_the_weighted_mean_of_both_labels_losses",
    ),
    Mutant(
        "the loss is not divided by the global batch",
        "training/loop.py",
        "(self.model(batch.images), batch.labels) / self.global_batch",
        "(self.model(batch.images), batch.labels)",
        "test_crown.py::test_four_micro_batches_on_one_worker_match_plain_pytorch",
    ),
    Mutant(
        "the loss is divided by the first batch of a schedule",
        "recipe/arithmetic/plan.py",
        "[(part, size, each",
        "[(part, self.global_batch, each",
        "test_crown.py::test_a_batch_schedule_matches_plain_pytorch_for_any_division",
    ),
    Mutant(
        "the policy of a batch schedule counts updates",
        "schedules/build.py",
        "policy(piece.samples_before(step) / plan.global_batch)",
        "policy(step)",
        "recipe/arithmetic/test_pieces.py::"
        "test_the_rate_follows_the_samples_seen_so_that_epochs_mean_epochs",
    ),
    Mutant(
        "gradients of the step before stay in the buffers",
        "training/loop.py",
        "            self.reducer.zero()\n",
        "            pass\n",
        "test_crown.py::test_four_micro_batches_on_one_worker_match_plain_pytorch",
    ),
    Mutant(
        "the reducer sends during the first micro-batch",
        "training/loop.py",
        "last=micro == accumulation - 1",
        "last=micro == 0",
        "test_crown.py::test_two_threads_as_workers_match_plain_pytorch",
    ),
    Mutant(
        "the running statistics of a skipped step count",
        "training/loop.py",
        "self.spans.update(skipped)",
        "self.spans.update()",
        "training/test_precision.py::test_a_skipped_step_changes_no_weight_momentum_or_statistic",
    ),
    Mutant(
        "a block forgets its shortcut",
        "models/fusion.py",
        "norm_relu(block.bn2, maps, _shortcut(block, images), relu=block.relu)",
        "norm_relu(block.bn2, maps, relu=block.relu)",
        "models/test_fusion.py::"
        "test_the_second_forward_pass_of_a_block_gives_the_bits_of_the_first",
    ),
    Mutant(
        "a block forgets its drop path",
        "models/fusion.py",
        "maps = block.drop_path(maps)",
        "maps = maps.clone()",
        "models/test_fusion.py::"
        "test_the_second_forward_pass_of_a_block_gives_the_bits_of_the_first",
    ),
    Mutant(
        "a block forgets its last ReLU",
        "models/fusion.py",
        "norm_relu(block.bn3, maps, _shortcut(block, images), relu=block.relu)",
        "norm_relu(block.bn3, maps, _shortcut(block, images), relu=nn.Identity())",
        "models/test_fusion.py::"
        "test_the_second_forward_pass_of_a_block_gives_the_bits_of_the_first",
    ),
    Mutant(
        "the rate does not enter the buffer",
        "optim/lars.py",
        "into=lr if rate_inside else 1.0",
        "into=1.0",
        "optim/test_lars_fast.py::test_every_implementation_matches_the_formula",
    ),
    Mutant(
        "fujitsu's ratio forgets the peak rate",
        "optim/lars.py",
        '(_number(group, "base_lr") if convention == "fujitsu" else 1)',
        "1",
        "optim/test_lars.py::test_fujitsus_decay_is_scaled_by_the_peak_rate",
    ),
    Mutant(
        "the trust ratio forgets weight decay",
        "optim/kernels/fused.py",
        "(g + rule.ratio_decay * w + rule.eps)",
        "(g + rule.eps)",
        "optim/test_lars_fast.py::test_every_implementation_matches_the_formula",
    ),
    Mutant(
        "moments of the step before count again",
        "models/batchnorm.py",
        "            layer.num_spans = 0\n",
        "            pass\n",
        "models/test_batchnorm.py::test_without_momentum_the_running_statistics_are_the_mean_over_steps",
    ),
    Mutant(
        "what backward computes again counts again",
        "models/batchnorm.py",
        "is_recomputed = not compiled and torch._C._current_graph_task_id() != -1",
        "is_recomputed = False",
        "models/test_activation_checkpointing.py::test_recomputed_layers_count_once_on_one_worker",
    ),
    Mutant(
        "statistics of a replayed pass count",
        "training/replay.py",
        "        restore_moments()\n",
        "        pass\n",
        "training/test_replays_of_passes.py::test_the_updates_have_the_same_bits_with_and_without_replays",
    ),
    Mutant(
        "generators stay as a replayed pass leaves them",
        "training/replay.py",
        "        restore_generators()\n",
        "        pass\n",
        "training/test_replays_of_passes.py::test_a_run_has_the_same_weights_with_and_without_replays",
    ),
    Mutant(
        "a dispute is decided by the first partner again",
        "training/replay.py",
        "    return first, 1 + first % (groups - 1)",
        "    return first, first",
        "training/test_replays_of_passes.py::test_every_pair_of_workers_comes_and_the_third_is_another_one",
    ),
    Mutant(
        "the pass of an update is not repeated after a dispute",
        "training/replay.py",
        "repeated = _OwnPass(rank, self._record(step, batch))",
        "repeated = own",
        "training/test_replays_of_passes.py::test_an_error_that_comes_once_accuses_its_worker_and_not_the_partner",
    ),
    Mutant(
        "the groups of a device batch count as one span",
        "models/batchnorm.py",
        "num = -(-len(images) // self.span) if group is None else 1",
        "num = 1",
        "models/test_batchnorm.py::test_running_statistics_are_updated_once_per_step_with_the_mean_of_all_spans",
    ),
    Mutant(
        "workers that share a span average their variances",
        "models/batchnorm_functional.py",
        "(shares * (variances + (means - mean).square())).sum(0)",
        "(shares * variances).sum(0)",
        "models/test_spans.py::test_workers_that_share_a_span_match_batchnorm_on_the_whole_batch",
    ),
    Mutant(
        "backward divides a shared span's sums by one worker's samples",
        "models/batchnorm_functional.py",
        "shift, slope = -gain * sums / num",
        "shift, slope = -gain * sums / (images.numel() // len(mean))",
        "models/test_spans.py::test_workers_that_share_a_span_match_batchnorm_on_the_whole_batch",
    ),
    Mutant(
        "compressed sums are not divided before they are sent",
        "distributed/reducer.py",
        "torch.div(self.buffer, divisor, out=self.sent)",
        "self.sent.copy_(self.buffer)",
        "distributed/test_reducer.py::test_compressed_sums_do_not_overflow_and_norms_stay_exact",
    ),
    Mutant(
        "a group is sent before its last gradient is there",
        "distributed/reducer.py",
        "len(self._groups) and not self._groups[sent].pending:",
        "len(self._groups) and len(self._groups[sent].pending) < 2:",
        "test_crown.py::test_two_threads_as_workers_match_plain_pytorch",
    ),
    Mutant(
        "every batch counts alike, however many samples it has",
        "polish/moments.py",
        "            self._merge(count, mean, deviations)\n            return",
        "            self._merge(1, mean, deviations)\n            return",
        "polish/test_polish_exact.py::test_every_type_of_layer_has_exact_statistics",
    ),
    Mutant(
        "what batches differ by is no variance",
        "polish/moments.py",
        "        self.deviations.addcmul_(shift, shift, value=self.count * count / total)\n",
        "",
        "polish/test_polish_exact.py::test_every_type_of_layer_has_exact_statistics",
    ),
    Mutant(
        "what batches that a GPU merges differ by is no variance",
        "polish/moments.py",
        "within + between",
        "within",
        "polish/test_polish_exact.py::test_an_accelerator_merges_many_batches_at_once_and_exactly",
    ),
    Mutant(
        "variances are the population's",
        "polish/moments.py",
        "return self.deviations / (self.count - 1)",
        "return self.deviations / self.count",
        "polish/test_polish_exact.py::test_every_type_of_layer_has_exact_statistics",
    ),
    Mutant(
        "every worker counts alike, however many samples it has",
        "polish/moments.py",
        "new_tensor([part.count for part in parts])",
        "new_tensor([1.0 + 0 * part.count for part in parts])",
        "polish/test_polish_exact.py::test_every_type_of_layer_has_exact_statistics",
    ),
    Mutant(
        "polishing leaves the model in evaluation mode",
        "models/wrappers.py",
        "            module.training = training\n",
        "            pass\n",
        "polish/test_polish.py::test_only_the_running_statistics_change",
    ),
    Mutant(
        "frozen layers are polished",
        "polish/statistics.py",
        "        if layer in left:\n            continue\n",
        "",
        "polish/test_polish_layers.py::test_frozen_layers_keep_statistics_and_normalise_by_them",
    ),
    Mutant(
        "the average takes from the model what it should keep",
        "training/averages.py",
        "self._share = 1 - decay",
        "self._share = decay",
        "training/test_averages.py::test_the_average_is_the_recursion_in_float64",
    ),
    Mutant(
        "a skipped update is averaged",
        "training/averages.py",
        "if skipped is None:",
        "if True:",
        "training/test_averages.py::test_a_skipped_update_is_not_averaged",
    ),
    Mutant(
        "a stage that is rolled back leaves its loss scale",
        "training/state.py",
        '        self.scaler.load_state_dict(self.snapshot["scaler"])\n',
        "",
        "training/test_guard.py::test_a_stage_that_is_undone_leaves_no_loss_scale",
    ),
    Mutant(
        "training goes on from what was polished of an unfinished run",
        "runs/run.py",
        "    require_resumable(checkpoint, session.plan, folder)\n",
        "",
        "runs/test_checkpoints.py::test_training_cannot_go_on_from_what_was_polished_of_an_unfinished_run",
    ),
    Mutant(
        "updates that a diverged stage never made are counted",
        "training/state.py",
        "        self.discarded += step - self.step\n",
        "",
        "training/test_guard.py::test_only_updates_that_were_made_are_counted_however_often_the_run_was_stopped",
    ),
    Mutant(
        "a stage is kept that is as good as none",
        "training/judging.py",
        "metrics.top1 > last.held_out",
        "metrics.top1 >= last.held_out",
        "training/test_judging.py",
    ),
    Mutant(
        "a stage that is not kept is not rolled back",
        "training/judging.py",
        "        state.roll_back()\n",
        "        pass\n",
        "training/test_judging.py",
    ),
    Mutant(
        "a worker's answers are those of the first samples",
        "training/evaluation.py",
        "np.searchsorted(everyone, samples)",
        "np.arange(len(samples))",
        "training/test_mistakes.py::test_shares_of_any_length_are_gathered_in_the_order_of_the_index",
    ),
    Mutant(
        "a gain is judged by one standard error",
        "report/run.py",
        "2 * math.sqrt(fixed + broken)",
        "math.sqrt(fixed + broken)",
        "report/test_report.py::test_the_noise_is_that_of_the_images_that_changed",
    ),
    Mutant(
        "an update waits for its last images only",
        "training/loop.py",
        "return zip(marks[::2], marks[1::2], strict=True)",
        "return zip(marks[-2::2], marks[-1::2], strict=True)",
        "training/test_step_times.py",
    ),
    Mutant(
        "the labels of mixed images are not smoothed",
        "training/losses.py",
        'label_smoothing=mass, reduction="sum"',
        'label_smoothing=0.0 if labels.is_floating_point() else mass, reduction="sum"',
        "training/test_loss.py",
    ),
    Mutant(
        "weights of classes are not of mean 1",
        "training/losses.py",
        "(counts.sum() / (given @ counts))",
        "(len(counts) / given.sum())",
        "training/test_loss.py::test_weights_have_a_mean_of_1_over_the_training_images",
    ),
    Mutant(
        "gradients are clipped with their loss scale",
        "training/loop.py",
        "self.result.gradient_norm / self.scaler.scale(self._one)",
        "self.result.gradient_norm",
        "training/test_clipping.py::test_all_of_it_together_is_plain_pytorchs",
    ),
    Mutant(
        "the last layer is slowed too",
        "optim/rates.py",
        "scale_rate(group, decay**depth)",
        "scale_rate(group, decay ** (depth + 1))",
        "training/test_clipping.py::test_all_of_it_together_is_plain_pytorchs",
    ),
    Mutant(
        "a target is reached by more than it",
        "lab/studies/metrics.py",
        "evaluation.top1 >= target",
        "evaluation.top1 > target",
        "lab/studies/test_metrics.py::test_a_target_costs_what_its_first_evaluation_had_cost",
    ),
    Mutant(
        "the noise of an erased box depends on the batch",
        "data/erasing.py",
        "Stream.ERASE_NOISE, block=positions.start",
        "Stream.ERASE_NOISE, block=0",
        "data/test_erasing.py::test_an_image_is_erased_alike_in_any_batch",
    ),
    Mutant(
        "the copies of a block have the same partners",
        "data/order.py",
        "places * multipliers % sizes",
        "(places + copies) % sizes",
        "data/test_repeats.py::test_no_pair_recurs_and_no_sample_is_its_own_partner",
    ),
    Mutant(
        "the chunks of an epoch follow in the order of the index",
        "data/order.py",
        'windows[np.argsort(words, kind="stable")] = ',
        "windows[:] = ",
        "data/test_chunked_order.py::test_every_chunk_is_equally_likely_in_every_window",
    ),
    Mutant(
        "statistics are of the first windows of chunks",
        "data/pipeline.py",
        "samples = self.random_samples(range(num_samples))",
        "samples = self.training_samples(range(num_samples))",
        "data/test_chunked_order.py::test_clean_updates_have_the_order_and_statistics_random_images",
    ),
    Mutant(
        "operations are drawn for the place in the batch",
        "data/operations/draws.py",
        "block=positions.start * blocks",
        "block=0",
        "data/test_operations.py::test_draws_depend_on_seed_and_position_alone",
    ),
    Mutant(
        "images are rotated about the middle of a pixel",
        "data/operations/numbers.py",
        "middle_x = width / 2",
        "middle_x = (width - 1) / 2",
        "data/test_operations.py::test_pixels_are_those_of_the_library[torchvision]",
    ),
    Mutant(
        "a stronger brightness is always brighter",
        "data/operations/draws.py",
        "1.0 + signs * (magnitudes / 10 * 0.9)",
        "1.0 + (magnitudes / 10 * 0.9)",
        "data/test_operations.py::test_shares_and_strengths_are_those_of_the_library[timm]",
    ),
    Mutant(
        "pixels from outside of the image are those of its border",
        "data/operations/batched.py",
        "torch.where(is_kept, channel, value)",
        "channel",
        "data/test_operations.py::test_pixels_of_usual_images_are_pillows_on_a_device_too",
    ),
    Mutant(
        "pairs are drawn for the place in the batch",
        "data/mixing.py",
        "first = positions.start // 2",
        "first = 0",
        "data/test_mixing.py::test_images_and_labels_are_those_written_by_hand",
    ),
    Mutant(
        "partners are images of the second half of the batch",
        "data/mixing.py",
        "is_label.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)",
        "is_label.roll(len(labels) // 2, 0)",
        "data/test_mixing.py::test_images_and_labels_are_those_written_by_hand",
    ),
    Mutant(
        "the share of a box is what was drawn, not its pixels",
        "data/mixing.py",
        "np.where(pairs.is_cut, 1 - areas / (height * width), pairs.shares)",
        "pairs.shares",
        "data/test_mixing.py::test_images_and_labels_are_those_written_by_hand",
    ),
    Mutant(
        "mixing ends an update late",
        "recipe/arithmetic/plan.py",
        "return self.step_at(position) < self.mix_steps",
        "return self.step_at(position) <= self.mix_steps",
        "data/test_mixing.py::test_mixing_ends_with_an_update_and_its_box_follows_the_size",
    ),
    Mutant(
        "mixed images are erased",
        "data/augment.py",
        """    if request.erasures is not None:
        batch = batch._replace(images=erase(batch.images, request.erasures))
    if request.mix is not None:
        batch = mix(batch, request.mix)
""",
        """    if request.mix is not None:
        batch = mix(batch, request.mix)
    if request.erasures is not None:
        batch = batch._replace(images=erase(batch.images, request.erasures))
""",
        "test_together.py::test_images_are_those_of_pillow_and_torchvision_to_the_last_bit",
    ),
    Mutant(
        "images are moved after their operations",
        "data/augment.py",
        "if request.shifts is not None:",
        "if request.shifts is not None and request.operations is None:",
        "test_together.py::test_images_are_those_of_pillow_and_torchvision_to_the_last_bit",
    ),
    Mutant(
        "boxes to erase are drawn for the place in the batch",
        "data/erasing.py",
        "Stream.ERASE, block=positions.start * blocks",
        "Stream.ERASE, block=0",
        "data/test_erasing.py::test_an_image_is_erased_alike_in_any_batch",
    ),
    Mutant(
        "copies of an image are mirrored alike",
        "data/order.py",
        "return sources // num_samples * repeats + copies",
        "return sources // num_samples * repeats",
        "data/test_repeats.py::"
        "test_occurrences_count_the_same_image_and_alternating_flips_follow_them",
    ),
    Mutant(
        "a threshold is above a value of pixels",
        "data/operations/draws.py",
        "255.0 * (last - magnitudes) / last",
        "255.0 * (1.0 - magnitudes / last)",
        "data/test_operations.py::test_thresholds_and_bits_are_exactly_torchvisions",
    ),
    Mutant(
        "the second label has the weight of the first",
        "training/losses.py",
        "labels = labels * weights.to(logits.dtype) / factors.unsqueeze(1)",
        "factors = weights.to(logits.dtype)[labels.argmax(1)]",
        "training/test_loss.py::test_the_loss_of_mixed_images_is_that_of_both_labels_by_their_shares",
    ),
    Mutant(
        "gradients are clipped before they are summed",
        "training/loop.py",
        "        self.scaler.scale(loss).backward()\n",
        """        self.scaler.scale(loss).backward()
        if self.clip_norm is not None:
            norm = gradient_norm(self.reducer.parameters) / self.scaler.scale(self._one)
            self.reducer.scale(clip_factor(norm, self.clip_norm))
""",
        "training/test_clipping.py::test_all_of_it_together_is_plain_pytorchs",
    ),
)
