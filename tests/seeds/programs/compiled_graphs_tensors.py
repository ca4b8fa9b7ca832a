import conveyor as ray
import conveyor.dag

import torch

@ray.remote
class GPUActor:
    def echo_device(self, tensor: torch.Tensor) -> str:
        return str(tensor.device)

actor = GPUActor.remote()

with ray.dag.InputNode() as inp:
  inp = inp.with_tensor_transport()
  dag = actor.echo_device.bind(inp)

cdag = dag.experimental_compile()
print(ray.get(cdag.execute(torch.zeros(10))))
# Expected: cpu
cdag.teardown()
