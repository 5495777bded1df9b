"""The public threads of the loops in this folder: what differed from one process, and why.

Each loop is written from its thread's description, on scikit-learn's digits. The cause is the one
on which the thread agreed. `checks` are the audit's checks in which the cause has its place; they
were fixed before the first audit.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Thread:
    """A public thread, and the loop after it."""

    script: str
    """Name of the script, without its suffix."""

    address: str
    """Repository and number on github.com."""

    title: str
    """Title of the thread; shortened at the end."""

    cause: str
    """What the thread found, in one sentence."""

    checks: tuple[str, ...] = ()
    """Checks in which a fault names the cause; empty for a correct loop."""

    horovod: bool = False
    """True if the loop needs Horovod."""

    held_back: bool = False
    """True if the loop was first audited after the mending."""

    @property
    def correct(self) -> bool:
        """True if the loop computes what one process does."""
        return not self.checks

    @property
    def link(self) -> str:
        """Address of the thread."""
        return f"https://github.com/{self.address.replace(' ', '/issues/')}"


GRADIENT = ("gradient direction", "gradient scale")

THREADS = (
    Thread(
        "01_new_parameter",
        "pytorch/pytorch 12603",
        "DistributedDataParallel does not get the same grad at all",
        "a weight assigned after the wrapping has no hook, so it is not reduced",
        ("gradient direction", "updates"),
    ),
    Thread(
        "02_there_and_back",
        "pytorch/pytorch 104336",
        "DDP: moving model to CPU and back to GPU breaks gradient synchronization",
        "converted parameters lose their hooks, so nothing is reduced",
        GRADIENT,
    ),
    Thread(
        "03_parts_called",
        "intel/e2eAIOK 198",
        "DDP grads not sync bug fix in domain adapter",
        "parts of the wrapped model are called instead of the wrapper",
        GRADIENT,
    ),
    Thread(
        "04_lora_patched",
        "kohya-ss/sd-scripts 989",
        "Fix gradients synchronization",
        "LoRA replaces forward methods, so the wrapped adapter is never called",
        GRADIENT,
    ),
    Thread(
        "05_loss_with_weights",
        "KevinMusgrave/pytorch-metric-learning 710",
        "Wrapping the loss with DistributedDataParallel",
        "the weights of the loss are not wrapped, so each process has its own",
        (*GRADIENT, "weights", "updates"),
    ),
    Thread(
        "06_unfrozen_later",
        "facebookresearch/detectron2 2486",
        "How to unfreeze some weight parameters at certain iteration during training?",
        "layers frozen at the wrapping are never reduced; they train from update 500",
        (*GRADIENT, "updates", "weights"),
    ),
    Thread(
        "07_flag_after_forward",
        "karpathy/build-nanogpt 30",
        "fix sync issue that results in incorrect gradient accumulation and incorrect loss",
        "the flag of the last micro-batch is set after its forward pass, so nothing is reduced",
        GRADIENT,
    ),
    Thread(
        "08_dice_of_own_batch",
        "MIC-DKFZ/nnUNet 1354",
        "bug in MemoryEfficientSoftDiceLoss",
        "sums of a batch's dice are gathered and not added, so each process has its own dice",
        GRADIENT,
    ),
    Thread(
        "09_tokens_per_worker",
        "huggingface/transformers 34242",
        "Add DDP token averaging for equivalent non-parallel training",
        "means over unequal numbers of tokens are averaged",
        GRADIENT,
    ),
    Thread(
        "10_clip_in_accumulation",
        "huggingface/accelerate 641",
        "Gradient accumulation doesn't work with Accelerate's clip_grad_norm_",
        "gradients are clipped in every micro-batch, before they are averaged",
        ("clipping",),
    ),
    Thread(
        "11_schedule_by_processes",
        "huggingface/diffusers 3954",
        "Wrong learning rate scheduler training step count for examples with multi-gpu",
        "the prepared schedule moves once for each process, and ends early",
        ("warm-up",),
    ),
    Thread(
        "12_plateau_of_own_loss",
        "rmchurch/disruptcnn 3",
        "ReduceLROnPlateau not reducing in certain scenarios",
        "each process lowers its learning rate by its own validation loss",
        ("learning rates", "evaluation mean"),
    ),
    Thread(
        "13_horovod_no_broadcast",
        "horovod/horovod 672",
        "Train model on 4-gpu, the model parameters from different devices are different",
        "the first weights are not broadcast",
        ("weights",),
        horovod=True,
    ),
    Thread(
        "14_divided_twice",
        "huggingface/accelerate 3520",
        "Dataloader length got split twice with DistributedSampler and Accelerate",
        "a sampler divides the samples, and Accelerate divides the batches again",
        ("samples",),
    ),
    Thread(
        "15_loss_times_workers",
        "neuralmagic/sparseml 135",
        "Fix incorrect loss scaling in DDP setup",
        "the mean loss is multiplied by the number of processes",
        ("gradient scale",),
    ),
    Thread(
        "16_loss_summed_then_mean",
        "verl-project/verl-SpeCo 29",
        "fix(trainer): stop scaling drafter gradients down by world size",
        "the loss is divided by the tokens of all processes, and gradients are averaged again",
        ("gradient scale",),
    ),
    Thread(
        "17_gather_with_grad",
        "mlfoundations/open_clip 616",
        "gather-with-grad without local-loss?",
        "gathering with gradients and the whole loss multiply gradients by the processes",
        ("gradient scale",),
    ),
    Thread(
        "18_gradient_penalty",
        "pytorch/pytorch 47562",
        "Wrong gradients when using DistributedDataParallel and autograd.grad",
        "a bias without a gradient keeps the reducer waiting, so nothing is reduced",
        GRADIENT,
    ),
    Thread(
        "19_codebook_of_rank_0",
        "espnet/espnet 6284",
        "codec fix: DDP logic and dead code revival logic",
        "codebook statistics are those of rank 0's batch; the other ranks' are discarded",
        ("buffers", "running statistics"),
    ),
    Thread(
        "20_skipped_on_one",
        "NVIDIA-NeMo/Automodel 2468",
        "keep DFlash DDP ranks in lockstep on no-valid-anchor skips",
        "a process without a usable sample skips its batch alone",
        (*GRADIENT, "updates"),
    ),
    Thread(
        "21_positives_of_own_batch",
        "tianzhi0549/FCOS 228",
        "Why average the normalization number during computing the losses?",
        "losses divided by the positives of each process are averaged",
        GRADIENT,
    ),
    Thread(
        "22_optimizer_in_forward",
        "lucidrains/vector-quantize-pytorch 222",
        "Learnable codebook synchronization across workers?",
        "an optimizer inside a layer uses the gradients of its own process",
        ("weights", "buffers", "updates"),
    ),
    Thread(
        "23_weighted_alike",
        "EPFL-VILAB/omnidata-paper-code-dump 5",
        "problems of WeightedRandomSampler in multi-gpu training",
        "a weighted sampler draws the same samples in every process",
        ("samples",),
    ),
    Thread(
        "24_mean_of_scores",
        "Lightning-AI/pytorch-lightning 3023",
        "Get correct metrics for an epoch with DDP",
        "the average precision of each process is averaged",
        ("evaluation mean",),
    ),
    Thread(
        "25_reduced_twice",
        "kubeflow/pytorch-operator 122",
        "Double gradient reduction in examples?",
        "equal gradients are averaged once more, which changes nothing",
    ),
    Thread(
        "26_forward_outside_no_sync",
        "speechbrain/speechbrain 1802",
        "[Bug]: DDP is going blblblblblblblbl",
        "gradients are reduced in every micro-batch, which is slow but exact",
    ),
    Thread(
        "27_horovod_synchronized_twice",
        "horovod/horovod 1099",
        "Duplicated Synchronization with Gradient Clipping?",
        "gradients are averaged twice, which is slow but exact",
        horovod=True,
    ),
    Thread(
        "28_loss_printed_by_rank_0",
        "karpathy/llm.c 551",
        "Fix PyTorch DDP loss bug",
        "only the printed loss is that of one process",
    ),
    Thread(
        "29_loss_reduced_first",
        "sanderwood/bgpt 5",
        "Loss Calucation",
        "the loss is divided by the processes before backward, and gradients are averaged again",
        ("gradient scale",),
        held_back=True,
    ),
    Thread(
        "30_length_before_prepare",
        "huggingface/diffusers 8236",
        "Wrong learning rate scheduler training step count when setting --num_train_epochs",
        "the schedule counts the batches of one process, and decays too slowly",
        ("warm-up",),
        held_back=True,
    ),
    Thread(
        "31_target_network",
        "HorizonRobotics/alf 1475",
        "add a function for checking parameter consistency when using DDP",
        "a target network moves by statistics of the batch of its own process",
        ("weights",),
        held_back=True,
    ),
    Thread(
        "32_gathered_constants",
        "facebookresearch/vissl 123",
        "Gradients were not correctly propagated through the SimCLR Info NCE loss",
        "gathered embeddings are constants, so a part of the gradient is lost",
        GRADIENT,
        held_back=True,
    ),
    Thread(
        "33_buffers_not_sent",
        "ZhikangNiu/encodec-pytorch 15",
        "No broadcast on buffer in DDP training?",
        "the codebook is a buffer, and each process keeps its own",
        ("buffers",),
        held_back=True,
    ),
    Thread(
        "34_teacher_of_each",
        "facebookresearch/unbiased-teacher 31",
        "Issue About EMA process in code",
        "every process updates its copy of the teacher by equal weights",
        held_back=True,
    ),
)
