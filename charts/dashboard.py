"""See runs, plan them and try the models, in a browser: ``.venv/bin/python charts/dashboard.py --help``."""

from dsgpt.common.command_line import run_script
from dsgpt.dashboard.server import is_served, main, open_browser, same_origin

if is_served():
    from dsgpt.dashboard.overview import show_frame

    show_frame()
elif __name__ == "__main__":
    run_script(main)
else:  # `streamlit run` imports this file as the server's application, which then runs it for every page
    from streamlit.starlette import App

    app = App(__file__, middleware=[same_origin()], lifespan=open_browser)
