//! Nothing of the main job needs root.

use agent_tests::Host;

#[test]
fn test_a_user_without_privileges_runs_a_job() {
    let host = Host::unprivileged();
    let code =
        host.project("p", &[("t.py", "import os\nprint(os.getuid())\nopen('outputs/x', 'w').write('x')\n")]);
    let run = ["run", code.to_str().unwrap(), "--", "python", "t.py"];
    let ran = host.ctl(&run).ok().says("starting one of your own").says("outputs/x");
    assert_eq!(ran.stdout, "65534\n");
    let status = host.ctl(&["status"]).ok().stdout;
    assert!(status.contains("clean kill"), "{status}");
    host.ctl(&["doctor"]).ok();
    host.ctl(&["stop"]).ok();
}
