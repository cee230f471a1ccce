# The artifact, compiled and simulated in one child process.
# Reads the graph, its check, the traces. Writes model.rknn, contract.json, observations/*.npz and build.json.
rule build:
    input:
        inputs("build"),
    output:
        record("build"),
    log:
        log_of("build"),
    resources:
        mem_mb=build_mb,
        runtime=120,
    params:
        key=key("build"),
    shell:
        command("build")
