# One row by layer, step, tensor and operator; asked for by its path: `snakemake results/models/.../diagnosis.json`.
# Reads the row's verdict, metrics and accuracy analysis, the graph and the artifact. Writes diagnosis.json, heatmap.png, diagnosis.html.
rule diagnose:
    input:
        inputs("diagnose"),
    output:
        record("diagnose"),
    log:
        log_of("diagnose"),
    resources:
        mem_mb=800,
        runtime=10,
    params:
        key=key("diagnose"),
    shell:
        command("diagnose")
