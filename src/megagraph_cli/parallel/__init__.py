"""One file per parallel axis; torch.distributed lives here. Blind to the model, the graph and the cost model."""
