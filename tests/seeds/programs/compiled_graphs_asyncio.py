import conveyor as ray

@ray.remote
class EchoActor:
  def echo(self, msg):
    return msg

actor = EchoActor.remote()
with ray.dag.InputNode() as inp:
  dag = actor.echo.bind(inp)

cdag = dag.experimental_compile(enable_asyncio=True)

ref = await cdag.execute_async("hello")
print(await ref)
# Expected: hello
