# The self-test graphs, compiled for a chip.
# Reads nothing. Writes {name}/model.rknn, contract.json and feeds.npz of each, and probe.json.
rule probe:
    input:
        inputs("probe"),
    output:
        record("probe"),
    log:
        log_of("probe"),
    resources:
        mem_mb=2000,
        runtime=30,
    params:
        key=key("probe"),
    shell:
        command("probe")
