# The targets that ask instead of make: `gate` fails when a required row is not `pass`, `audit` lists stale results.
rule gate:
    input:
        records("tabulate"),
    log:
        "results/logs/gate.log",
    localrule: True
    params:
        config=canonical(config),
    shell:
        "python -m kvgate gate --config {params.config:q} 2>&1 | tee {log:q}; exit ${{PIPESTATUS[0]}}"


rule audit:
    log:
        "results/logs/audit.log",
    localrule: True
    params:
        config=canonical(config),
    shell:
        "python -m kvgate audit --config {params.config:q} 2>&1 | tee {log:q}; exit ${{PIPESTATUS[0]}}"
