"""See runs, plan them and try the models, in a browser: ``.venv/bin/python charts/dashboard.py --help``."""

from dsgpt.common.command_line import run_script
from dsgpt.dashboard.command import is_served, main

if is_served():
    from dsgpt.dashboard.app import show

    show()
elif __name__ == "__main__":
    run_script(main)
else:  # `streamlit run` imports this file as the server's application, which then runs it for every page
    from streamlit.starlette import App

    from dsgpt.dashboard.app import open_browser, same_origin

    app = App(__file__, middleware=[same_origin()], lifespan=open_browser)
