"""The same training on two ranks, sharded in every way: its weights add up to those of DDP, and it is certified."""

from __future__ import annotations

from pathlib import Path

import pytest
from script_records import observe_code, record_of

from paceline.analysis.findings import CERTIFIED
from paceline.analysis.training.certificate import certify_all

pytestmark = pytest.mark.slow

# Each way has two forked ranks with a group of their own, which they destroy before they end, as scripts should.
TRAIN = """
import gc, os, sys
from pathlib import Path
import paceline_observer
import torch, torch._dynamo
import torch.distributed as dist
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard

if "zero3" in sys.argv:
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
gc.freeze()
ways = sys.argv[1:]
children = []
for number in range(2 * len(ways)):
    children.append(os.fork())
    if children[-1] == 0:
        break
else:
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
way, rank = ways[number // 2], number % 2
os.environ["LOCAL_RANK"] = str(rank)
own = paceline_observer.observer
own.folder = own.folder / way
own.folder.mkdir(exist_ok=True)
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(str(own.folder / "store"), 2), rank=rank, world_size=2)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        # Odd sizes: parts end inside weights, and the last ones are padded.
        self.embedding, self.inner, self.head = torch.nn.Embedding(30, 6), torch.nn.Linear(6, 5), torch.nn.Linear(5, 30)

    def forward(self, ids):
        logits = self.head(self.inner(self.embedding(ids)))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


class Container(torch.optim.Optimizer):
    # As torchtitan's: an optimizer that steps others.
    def __init__(self, optimizer):
        self.optimizers = [optimizer]
        super().__init__([p for group in optimizer.param_groups for p in group["params"]], optimizer.defaults)

    def step(self):
        for each in self.optimizers:
            each.step()


torch.manual_seed(0)
model = Model()
cpu = {"device_id": torch.device("cpu"), "use_orig_params": way == "fsdp1-orig"}
if way.startswith("ddp"):
    model = torch.nn.parallel.DistributedDataParallel(model)
    if way == "ddp-bf16":

        def in_bf16(group, bucket):
            rounded = bucket.buffer().bfloat16()
            future = dist.all_reduce(rounded, async_op=True).get_future()
            return future.then(lambda reduced: bucket.buffer().copy_(reduced.value()[0]).div_(2))

        model.register_comm_hook(None, in_bf16)
elif way == "replicate":
    replicate(model)
elif way == "fsdp2":
    fully_shard(model.inner)
    fully_shard(model)
elif way.startswith("fsdp1"):
    model.inner = FSDP(model.inner, **cpu)
    model = FSDP(model, **cpu)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
if way == "replicate":
    optimizer = Container(optimizer)
if way == "zero3":
    settings = {"train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0.5, "zero_allow_untested_optimizer": True}
    settings["zero_optimization"] = {"stage": 3}
    deepspeed.init_distributed(dist_backend="gloo")
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
rows = torch.Generator().manual_seed(rank)
for step in range(3):
    ids = torch.randint(0, 30, (3, 4), generator=rows)
    if way == "zero3":
        engine.backward(engine(ids))
        engine.step()
        continue
    model(ids).backward()
    if way.startswith("fsdp1"):
        model.clip_grad_norm_(0.5)
    elif way == "replicate":
        total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, total)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""

WRAPPERS = {
    "ddp": "DDP",
    "replicate": "DDP",
    "fsdp1": "FSDP",
    "fsdp1-orig": "FSDP",
    "fsdp2": "FSDP2 or other DTensors",
    "zero3": "DeepSpeed ZeRO-3",
}


@pytest.mark.parametrize(
    "ways",
    [
        ("ddp", "replicate", "fsdp1", "fsdp1-orig", "fsdp2"),
        pytest.param(("ddp", "zero3"), marks=pytest.mark.exhaustive),
    ],
    ids=lambda ways: ways[-1],
)
def test_sharded_weights_add_up_to_the_whole(ways: tuple[str, ...], tmp_path: Path, nursery: None) -> None:
    if "zero3" in ways:
        pytest.importorskip("deepspeed")
    observe_code(TRAIN, *ways, folder=tmp_path, DS_ACCELERATOR="cpu")
    records = [record_of(tmp_path / way, (0, 1), way, float(number)) for number, way in enumerate(ways)]
    found = certify_all(records)
    for way, record in zip(ways, records, strict=True):
        certificate = found[record.spec.run_id]
        assert (certificate.level, certificate.differs, certificate.valid) == (CERTIFIED, (), True), way
        evidence = record.evidence
        assert evidence is not None
        assert evidence.parameters == 30 * 6 + 6 * 5 + 5 + 5 * 30 + 30
        assert "observer" not in evidence.settings
        assert evidence.settings["wrapper"] == WRAPPERS[way]
        assert len(evidence.groups or ()) == 1
        # Parts of both ranks, before training and after it.
        assert evidence.final_digests is not None
        assert evidence.final_digests.keys() == evidence.init_digests.keys()
        assert all(
            digest.endswith("+") == (evidence.settings["wrapper"] != "DDP") for digest in evidence.init_digests.values()
        )
        # FSDP2 returns a DTensor, which every rank has whole.
        assert [s.grad_norm for s in record.steps] == pytest.approx([s.grad_norm for s in records[0].steps], rel=1e-4)


def test_gradients_that_are_added_up_in_another_dtype_are_different(tmp_path: Path, nursery: None) -> None:
    ways = "ddp", "ddp-bf16"
    observe_code(TRAIN, *ways, folder=tmp_path)
    records = [record_of(tmp_path / way, (0, 1), way, float(number)) for number, way in enumerate(ways)]
    second = certify_all(records)[records[1].spec.run_id]
    assert "reduction dtype: bf16 instead of fp32" in second.differs
