"""Language models: export them (``export_llm``) and run them (``run_llm``)."""
