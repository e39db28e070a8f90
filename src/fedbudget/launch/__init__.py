"""From settings to a run that is ready to start: everything checked, nothing written, nothing spent.

The only place where things are put together; each part is built in one function:

    what is trained on what         inputs.py       the method, the aggregator    method.py
    a node's data                   node_data.py    the meters                    meters.py
    the task that nodes agree on    task.py

and of these a run is made with simulated nodes (simulate.py, on_ray.py), with nodes on other machines (serve.py, and
join.py at the node), with node processes on this machine (local.py), or with those of a Flower fleet (flower.py).
"""
