"""Shows runs, plans and models in a browser. ``charts/dashboard.py`` calls it; only this room imports Streamlit."""
