sed -i -e "s/'retries'/\"retries\"/" -e 's/"south",/"south"/' -e 's/"high": 9/"high": 9},/' -e 's/false,/false/' settings.json
