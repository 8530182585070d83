# Succeeds when settings.json is valid and says all that it said. -I: nothing beside the work is imported.
python3 -I - <<'END'
import json
expected = {"name": "harbour", "retries": 3, "hosts": ["north", "south"], "limits": {"low": 1, "high": 9}, "debug": False}
found = json.loads(open("settings.json").read())
raise SystemExit(found != expected or found["debug"] is not False)
END
