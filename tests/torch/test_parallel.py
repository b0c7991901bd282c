"""Two processes (gloo) that average gradients get those of one process with all packs."""

import datetime
import os
import traceback
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
import transformers
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.torch.cases import pack_of, packs_of, rows_of
from tests.torch.tiny_models import float64_throughout, make
from trajkit.errors import LayoutError, TrajkitError, UnsupportedModelError
from trajkit.torch import PackDataset, PackedModel, edge_logprobs, policy_loss
from trajkit.torch.models import carry_backward, model_inputs

accelerate = pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")

CASES = ("tail_changed", "siblings")


def packs():
    """One for each rank."""
    return [pack_of(case) for case in CASES]


def alone(model):
    """The mean over the ranks' packs of their gradients, from one process."""
    for pack in packs():
        (policy_loss(edge_logprobs(model, pack, local=True), pack) / 2).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What each piece of work said in two processes that see each other."""
    meeting = tmp_path_factory.mktemp("ranks") / "meeting"
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    started = [
        context.Process(target=_rank, args=(k, meeting, queue)) for k in range(2)
    ]
    for process in started:
        process.start()
    results = [queue.get() for _ in started]
    for process in started:
        process.join()
    return {name: [result[name] for result in results] for name in WORK}


def _rank(rank, meeting, queue):
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ |= {key: str(value) for key, value in place.items()}
    # a rank that waits for one that failed gives up
    dist.init_process_group(
        "gloo",
        init_method=meeting.as_uri(),
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=300),
    )
    results = {}
    for name, work in WORK.items():
        try:
            with float64_throughout():
                work(rank)
            results[name] = "equal"
        except BaseException:
            results[name] = traceback.format_exc()
    queue.put(results)
    dist.destroy_process_group()


def assert_equal(model, expected):
    found = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert len(found) == len(expected)
    largest = max(float(g.abs().max()) for g in expected.values())
    for name, gradient in expected.items():
        (given,) = [g for n, g in found.items() if n.endswith(name)]
        if hasattr(given, "full_tensor"):
            given = given.full_tensor()
        assert float((given - gradient).abs().max()) < 1e-12 * largest, name


def trains(rank, wrap, name="llama", change=lambda model: model):
    """Twice, since what a wrapper gathers is freed in between."""
    expected = alone(change(make(name)))
    model = change(make(name))
    wrapped, pack = wrap(model), packs()[rank]
    for _ in range(2):
        model.zero_grad()
        policy_loss(wrapped(pack), pack).backward()
        assert_equal(model, expected)


def ddp(model):
    return DistributedDataParallel(PackedModel(model))


def sharded(model, root="packed", **options):
    packed = PackedModel(model, **options)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(packed if root == "packed" else model)
    return packed


def checkpointed(model):
    model.activation_checkpointing_enable()
    return sharded(model, chunk_size=5)


def accelerated(model):
    wrapped = accelerate.Accelerator(cpu=True).prepare(PackedModel(model))
    assert isinstance(wrapped, DistributedDataParallel)
    return wrapped


def lora(model):
    torch.manual_seed(2)
    config = peft.LoraConfig(
        target_modules=["q_proj", "down_proj", "lm_head"], init_lora_weights=False
    )
    return peft.get_peft_model(model, config)


def empty(rank):
    """A rank without a pack takes part with gradients of zero."""
    model = make("llama")
    dataset = PackDataset(packs_of(rows_of(CASES[0])))
    pack = dataset[0]
    policy_loss(edge_logprobs(model, pack, local=True), pack).backward()
    expected = {n: p.grad / 2 for n, p in model.named_parameters()}
    model.zero_grad()
    wrapped = DistributedDataParallel(PackedModel(model))
    pack = dataset.empty_pack() if rank else pack
    policy_loss(wrapped(pack), pack).backward()
    assert_equal(model, expected)


def bare(rank):
    model, pack = make("llama"), packs()[rank]
    for function in (edge_logprobs, model_inputs, PackedModel(model)):
        given = (pack,) if isinstance(function, PackedModel) else (model, pack)
        with pytest.raises(LayoutError, match="2 ranks run, and nothing would average"):
            function(*given)
    with pytest.raises(LayoutError, match="2 ranks run"):
        carry_backward(model, [pack], policy_loss)
    local = edge_logprobs(model, pack, local=True)
    assert torch.equal(local, PackedModel(model, local=True)(pack))
    wrapped = DistributedDataParallel(model)
    for wrong in (lambda: edge_logprobs(wrapped, pack), lambda: PackedModel(wrapped)):
        with pytest.raises(
            UnsupportedModelError, match=r"PackedModel\(model\) to wrap"
        ):
            wrong()


WORK = {
    "DDP": partial(trains, wrap=ddp),
    "DDP, experts": partial(trains, wrap=ddp, name="qwen3_moe"),
    "FSDP2": partial(trains, wrap=sharded),
    "FSDP2, a window": partial(trains, wrap=sharded, name="mistral"),
    "FSDP2 within": partial(trains, wrap=partial(sharded, root="model")),
    "FSDP2, checkpointed": partial(trains, wrap=checkpointed),
    "adapters": partial(trains, wrap=ddp, name="qwen3", change=lora),
    "accelerate": partial(trains, wrap=accelerated),
    "a rank without a pack": empty,
    "no wrapper": bare,
}


@pytest.mark.parametrize("name", WORK)
def test_two_ranks_train_as_one(two_ranks, name):
    for result in two_ranks[name]:
        assert result == "equal", result


def test_a_trainer_takes_packs(tmp_path):
    pack = packs()[0]
    model = make("llama")
    expected = make("llama")
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    policy_loss(edge_logprobs(expected, pack), pack).backward()
    optimizer.step()

    class Trainer(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            return policy_loss(model(inputs["pack"]), inputs["pack"])

    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=1,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0,
        use_cpu=True,
        report_to=[],
        remove_unused_columns=False,
        save_strategy="no",
        disable_tqdm=True,
    )
    Trainer(
        PackedModel(model),
        arguments,
        train_dataset=[pack],
        data_collator=lambda packs: {"pack": packs[0]},
    ).train()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_adapters_alone_get_gradients():
    model, pack = lora(make("qwen3_moe")), packs()[0]
    plain = edge_logprobs(make("qwen3_moe"), pack).detach()
    found = edge_logprobs(model, pack)
    assert float((found.detach() - plain).abs().max()) > 0.01
    policy_loss(found, pack).backward()
    trained = [n for n, p in model.named_parameters() if p.grad is not None]
    assert trained
    assert all("lora_" in n for n in trained)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_adapters_that_add_tokens_are_refused(kind):
    config = getattr(peft, kind)(num_virtual_tokens=3, task_type="CAUSAL_LM")
    model = peft.get_peft_model(make("llama"), config)
    with pytest.raises(
        UnsupportedModelError, match=rf"'default' \({kind}\) depends on"
    ):
        edge_logprobs(model, packs()[0])


def test_a_packed_model_has_the_attributes_of_its_model():
    model = make("llama")
    packed = PackedModel(model)
    assert packed.config is model.config
    assert packed._no_split_modules == model._no_split_modules
    with pytest.raises(AttributeError, match="missing"):
        packed.missing  # noqa: B018
    with pytest.raises(TrajkitError, match="Linear is no model of transformers"):
        PackedModel(torch.nn.Linear(1, 1))
