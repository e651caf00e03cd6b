"""The pages of the dashboard: layout only. What they show is computed by functions without Streamlit."""
