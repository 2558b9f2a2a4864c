//! Names of data of several users, and those of the operator.

use std::fs;

use super::Site;

fn reads(site: &Site, reference: &str) -> String {
    site.project(
        "ada",
        &format!(
            "command: 'cat ${{{{inputs.data}}}}'\ninputs: {{data: {{type: uri_file, path: '{reference}'}}}}\n"
        ),
    )
}

#[test]
fn test_a_name_of_another_user_is_told_and_takes_no_place_of_the_operators() {
    let home = tempfile::tempdir().unwrap();
    let stores = home.path().join("data.yaml");
    let site = Site::configured(&format!("roles: controller\ndata_stores: {}\n", stores.display()), &[]);
    ["ada", "eve"].iter().for_each(|user| site.add_user(user, "submit"));
    let file = site.path("eve").join("evil.csv");
    fs::write(&file, "EVIL\n").unwrap();
    let create = |name: &str, more: &[&str]| {
        let line = ["data", "create", name, file.to_str().unwrap(), "--visibility", "all"];
        site.by("eve", &[&line, more].concat())
    };
    create("iris", &[]).ok();
    create("rose", &[]).ok();
    let input = |job: &str| site.json(&["show", job, "--json"])["spec"]["inputs"]["data"].clone();

    // Whose it is, is told to whoever reads it.
    let submitted = site.by("ada", &["submit", &reads(&site, "azureml:iris:1")]).ok();
    let submitted = submitted.says("inputs.data reads azureml:iris:1, which user eve made");
    assert_eq!(input(submitted.stdout.trim())["file"], "evil.csv");
    let own = site.project("eve", "command: 'true'\ninputs: {data: {path: 'azureml:iris:1'}}\n");
    let told = site.by("eve", &["submit", &own]).ok();
    assert!(!told.stderr.contains("which"), "{told:?}");

    // From now on the name is the operator's, in every version.
    fs::write(&stores, "data_map:\n  'azureml:iris:1': /srv/share/ok.txt\n").unwrap();
    for reference in ["azureml:iris:1", "azureml:iris@latest"] {
        let submitted = site.by("ada", &["submit", &reads(&site, reference)]).ok();
        assert_eq!(input(submitted.stdout.trim())["uri"], reference);
    }
    create("iris", &["--version", "2"]).code(1).says("DAT-109").says("data_map");
    let submitted = site.by("ada", &["submit", &reads(&site, "azureml:rose:1")]).ok();
    assert_eq!(input(submitted.stdout.trim())["file"], "evil.csv", "others stay as they are");
}
