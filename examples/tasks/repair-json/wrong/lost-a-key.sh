echo '{"name": "harbour", "hosts": ["north", "south"], "limits": {"low": 1, "high": 9}, "debug": false}' > settings.json
