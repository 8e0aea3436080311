//! Routes and their plugins.

use super::*;

#[test]
fn messages_about_routes() {
    let route = "[routes.r]\nplugin = 'p'\nmodels = ['small', 'large']\n";
    for (line, message) in [
        ("entry = 'smal'", "routes.r.entry = \"smal\": is not a model of this route: did you mean `small`?"),
        (
            "on_error = 'retry'",
            "routes.r.on_error = \"retry\": must be \"stay_local\", \"fail_request\" or \"disable_route\"",
        ),
        ("budget_us = 0", "routes.r.budget_us = 0: must be from 1 to 10000000"),
        ("budget_us = 'fast'", "routes.r.budget_us = \"fast\": must be an integer, not a string"),
        ("sha256 = 'abc'", "routes.r.sha256 = \"abc\": must be 64 hexadecimal digits, as `sha256sum` prints them"),
        (
            "roles = { small = 'x' }",
            "routes.r.models = [\"small\", \"large\"]: `roles` names the models already; keep one of them",
        ),
        ("overrides = 'threshold'", "routes.r.overrides = \"threshold\": must be an array of strings, not a string"),
        ("overrides = []", "routes.r.overrides = []: must name at least one setting; leave it out for none"),
        ("overrides = ['a', 'b', 'a']", "routes.r.overrides[2] = \"a\": is listed twice"),
        (
            "overrides = ['a', 'b..c']",
            "routes.r.overrides[1] = \"b..c\": must be a setting of the policy, for example \"threshold\" or \
             \"probabilities.large\"",
        ),
        ("max_variants = 3", "routes.r.max_variants = 3: goes with `overrides`; leave it out, or name settings there"),
        ("max_variants = 0\noverrides = ['a']", "routes.r.max_variants = 0: must be from 1 to 256"),
        (
            "overrides = ['a']\n[record]\ndirectory = 'd'",
            "routes.r.overrides: the route is recorded under [record], and a recording has one table of settings for \
             each route; leave it out, or list the routes to record under record.routes without this one",
        ),
        (
            "settings.x = -99999999999999999999",
            "routes.r.settings.x = -99999999999999999999: must be from -9223372036854775808 to 9223372036854775807, or \
             with a decimal point",
        ),
        ("settings = 3", "routes.r.settings = 3: must be a table, not an integer"),
        ("settings.x = nan", "routes.r.settings.x = NaN: must be a finite number: settings are handed over as JSON"),
        (
            "settings.x = [-inf]",
            "routes.r.settings.x[0] = -inf: must be a finite number: settings are handed over as JSON",
        ),
        (
            "settings.x = 12:00:00",
            "routes.r.settings.x = 12:00:00: dates are not supported in settings; write a string",
        ),
    ] {
        let line_number = if line.starts_with("roles") { 8 } else { 9 };
        assert_eq!(more(&format!("{route}{line}\n")), format!("dir/t.toml:{line_number}: {message}"));
    }
    for (text, message) in [
        (
            "[routes.r]\nplugin = 'p'\nroles = { tiny = 'x' }",
            "8: routes.r.roles: there is no model `tiny`: known are small, large",
        ),
        (
            "[routes.r]\nplugin = 'p'\nmodels = ['small', 'lrage']",
            "8: routes.r.models[1]: there is no model `lrage`: did you mean `large`?",
        ),
        ("[routes.r]\nplugin = 'p'\nmodels = ['small', 'small']", "8: routes.r.models[1] = \"small\": is listed twice"),
        ("[routes.r]\nplugin = 'p'\nmodels = []", "8: routes.r.models = []: must name at least one model"),
        (
            "[routes.r]\nplugin = 'p'",
            "6: [routes.r]: names no models; add `roles = { MODEL = \"ROLE\", … }` or `models = [\"MODEL\", …]`",
        ),
        (
            "[routes.r]\nmodels = ['small']",
            "6: [routes.r]: has no `plugin`; add `plugin = \"NAME\"` or a path to a library",
        ),
        (
            "[routes.small]\nplugin = 'p'",
            "6: [routes.small]: a model has this name and is a route by itself; choose another name",
        ),
        ("[routes.r]\nplugin = 'p'\n[routes.r]", "8: not valid TOML: `r` is given twice; leave one of them"),
    ] {
        assert_eq!(more(text), format!("dir/t.toml:{message}"));
    }
}

#[test]
fn refusals_of_policies_are_at_what_they_tell_of() {
    let text = "[routes.r]\nplugin = 'p'\nentry = 'small'\n[routes.r.settings]\nthreshold = 1\nthreshold_two = 2\n\
                [routes.r.roles]\nsmall = 'slm'\nlarge = 'lm'\n\
                [routes.s]\nplugin = 'p'\nmodels = ['small']\n";
    let config = parse(&format!("{BASE}{text}")).unwrap();
    let at = |route: usize, reason: &str| {
        let told = format!("policy `p` refuses to start: {reason}");
        match config.refused_error(&config.routes[route], &told, "no").origin {
            Some(Origin::Line(line)) => line - BASE.lines().count(),
            other => panic!("{other:?}"),
        }
    };
    let roles =
        "p needs exactly two models, with the roles \"slm\" and \"llm\"; route `r` has roles { small = \"slm\" }";
    assert_eq!((at(0, roles), at(1, roles)), (7, 12));
    assert_eq!(at(0, "p begins at model `large`; set entry = \"large\" in route `r`"), 3);
    assert_eq!((at(0, "threshold is odd"), at(0, "threshold_two: is odd"), at(0, "odd threshold")), (5, 6, 4));
    assert_eq!(at(1, "threshold is not set"), 10);
    assert_eq!(config.members_error(&config.routes[0], "no").origin, Some(Origin::Line(12)));
}

#[test]
fn plugins_are_looked_up() {
    let config = parse(BASE).unwrap();
    let expected: [PathBuf; 2] = ["/bin".into(), "dir/plugins".into()];
    assert_eq!(plugin_directories(&config, Some(Path::new("/bin/tokenrouter"))), expected);
    let config = parse(&format!("plugin_dirs = ['x', '/y']{BASE}")).unwrap();
    let expected: [PathBuf; 2] = ["dir/x".into(), "/y".into()];
    assert_eq!(plugin_directories(&config, None), expected);
}
