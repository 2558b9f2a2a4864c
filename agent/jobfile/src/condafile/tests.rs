//! What is read, what is refused and with which message: one table for each.

use proptest::prelude::*;

use super::*;
use agent_model::Code;

fn read_ok(text: &str) -> (CondaFile, Vec<String>) {
    let (file, warnings) = parse(text).unwrap_or_else(|fault| panic!("{text}\n{fault}"));
    let warnings = warnings.into_iter().map(|w| format!("{}: {}", w.place, w.message)).collect();
    (file, warnings)
}

fn texts(lines: &[Line]) -> Vec<&str> {
    lines.iter().map(|line| line.text.as_str()).collect()
}

/// A file of one dependency.
fn one(spec: &str) -> String {
    format!("dependencies:\n  - {spec}\n")
}

#[test]
fn test_a_usual_file_is_read_with_its_lines() {
    let text = "name: example\nchannels:\n  - conda-forge\n  - nodefaults\n  - defaults\n  - conda-forge\n\
                dependencies:\n  - python=3.11\n  - conda-forge::NumPy >= 1.26 , <2  # fast\n  - pip\n  - pip:\n\
                \x20     - scikit-learn\n      - --extra-index-url https://host/simple\n\
                variables:\n  OMP_NUM_THREADS: 1\n  EMPTY:\n";
    let (file, warnings) = read_ok(text);
    assert_eq!(warnings, [""; 0]);
    assert_eq!(file.name.as_deref(), Some("example"));
    assert_eq!(texts(&file.channels), ["conda-forge", "defaults"]);
    let line = |text: &str, line| Line { text: text.into(), line };
    assert_eq!(file.specs, [line("python=3.11", 8), line("conda-forge::NumPy>=1.26,<2", 9), line("pip", 10)]);
    assert_eq!(file.pip, [line("scikit-learn", 12), line("--extra-index-url https://host/simple", 13)]);
    assert_eq!(file.variables["OMP_NUM_THREADS"], "1");
    assert_eq!(file.variables["EMPTY"], "");
    assert!(!file.lacks_pip());
    assert_eq!(file.to_string(), "python=3.11, conda-forge::NumPy>=1.26,<2, 1 pip package");
}

#[test]
fn test_what_is_odd_but_clear_is_read_perhaps_with_a_warning() {
    type Row<'a> = (&'a str, &'a [&'a str], &'a [&'a str], &'a [&'a str]);
    let pip_added = "line 2, column 5: `pip` is not among the dependencies; it is added, because there are packages for it";
    let table: &[Row<'_>] = &[
        // (text, specs, pip, warnings)
        ("\u{feff}name: e\r\ndependencies:\r\n- python\r\n", &["python"], &[], &[]),
        (
            "{\"dependencies\": [\"python=3.10\", {\"pip\": [\"a\"]}, \"pip\"]}",
            &["python=3.10", "pip"],
            &["a"],
            &[],
        ),
        ("dependencies:\n- pip\n- pip: [a]\n- numpy\n- pip: [b]\n", &["pip", "numpy"], &["a", "b"], &[]),
        ("dependencies:\n  - pip: [a]\n", &[], &["a"], &[pip_added]),
        ("dependencies:\n- pip\n- pip:\n", &["pip"], &[], &["line 3, column 6: `pip` lists no packages"]),
        ("dependencies:\n- pip\n- pip: []\n", &["pip"], &[], &["line 3, column 8: `pip` lists no packages"]),
        ("channels:\ndependencies: [numpy]", &["numpy"], &[], &[]),
        ("channels: []\ndependencies: [numpy]", &["numpy"], &[], &[]),
        (
            "prefix: /usr\ndependencies: [numpy]\n",
            &["numpy"],
            &[],
            &["line 1, column 9: `prefix` has no effect: the node decides where environments are kept"],
        ),
        (
            "name: ../../etc\ndependencies: [numpy]\n",
            &["numpy"],
            &[],
            &["line 1, column 7: `name` is not one conda would take, and has no effect"],
        ),
        (
            "dependencies: [numpy]\nchanels: [a]\nplatforms: [linux-64]\n",
            &["numpy"],
            &[],
            &[
                "line 2, column 1: `chanels` is not known and has no effect; did you mean `channels`?",
                "line 3, column 1: `platforms` is not known and has no effect",
            ],
        ),
        (
            "dependencies: [pip, pip: ['https://host/${TOKEN}/a-1.whl']]\n",
            &["pip"],
            &["https://host/${TOKEN}/a-1.whl"],
            &[
                "line 1, column 27: `${TOKEN}` stays as it is: variables of your machine are not known on a node",
            ],
        ),
        (
            "dependencies: [pip, pip: [a, [b, '--pre'], c]]\n", // what an included file becomes
            &["pip"],
            &["a", "b", "--pre", "c"],
            &[],
        ),
        (
            "dependencies: [python=2.7.18, 7zip, _libgcc_mutex=0.1=main]",
            &["python=2.7.18", "7zip", "_libgcc_mutex=0.1=main"],
            &[],
            &[],
        ),
    ];
    for (text, specs, pip, expected) in table {
        let (file, warnings) = read_ok(text);
        assert_eq!(texts(&file.specs), *specs, "{text}");
        assert_eq!(texts(&file.pip), *pip, "{text}");
        assert_eq!(warnings, *expected, "{text}");
    }
}

#[test]
fn test_packages_get_one_spelling() {
    for (written, tidy, remark) in [
        ("numpy", "numpy", ""),
        ("numpy=1.26", "numpy=1.26", ""),
        ("numpy=1!2.0", "numpy=1!2.0", ""),
        ("numpy 1!2.0", "numpy 1!2.0", ""),
        ("numpy >= 1!2.0, < 2!0 , != 1!2.5", "numpy>=1!2.0,<2!0,!=1!2.5", ""),
        ("python = 3.9", "python=3.9", ""),
        ("numpy >= 1.2, < 2", "numpy>=1.2,<2", ""),
        ("numpy 1.26", "numpy 1.26", ""),
        ("numpy  1.26   py39_0", "numpy 1.26 py39_0", ""),
        ("numpy=1.26=py39h1_0", "numpy=1.26=py39h1_0", ""),
        ("numpy =1.26 py39_0", "numpy=1.26 py39_0", ""),
        ("numpy 1.26.* *mkl*", "numpy 1.26.* *mkl*", ""),
        ("'libblas=*=*mkl'", "libblas=*=*mkl", ""),
        (
            "'numpy[version=\">=1.2, <2\", build=\"*py39*\"]'",
            "numpy[version=\">=1.2, <2\", build=\"*py39*\"]",
            "",
        ),
        ("'numpy [version=1]'", "numpy[version=1]", ""),
        ("conda-forge/label/dev::numpy", "conda-forge/label/dev::numpy", ""),
        ("https://host:8443/chan::numpy~=1.2", "https://host:8443/chan::numpy~=1.2", ""),
        ("'pytorch>=1.8|1.7.*'", "pytorch>=1.8|1.7.*", ""),
        ("'nomkl!=2'", "nomkl!=2", ""),
        ("numpy=1.26 extra", "numpy=1.26 extra", "`extra` is taken as the build"),
        ("python==3.11", "python==3.11", "Python 3.11.0 alone"),
        ("python==3.11.4", "python==3.11.4", ""),
        ("numpy==1.26", "numpy==1.26", ""),
        ("numpy=latest", "numpy=latest", "unusual version"),
    ] {
        let (file, warnings) = read_ok(&one(written));
        assert_eq!(texts(&file.specs), [tidy], "{written}");
        assert_eq!(warnings.len(), usize::from(!remark.is_empty()), "{written}: {warnings:?}");
        assert!(
            warnings.iter().all(|w| w.contains(remark) && w.starts_with("line 2, column 5")),
            "{warnings:?}"
        );
    }
}

#[test]
#[allow(clippy::too_many_lines, reason = "a table")]
fn test_what_conda_would_misread_is_refused_with_its_place() {
    use Code::{JobFile, JobInvalid, JobUnsupported};
    let bomb = "a: &a [x,x]\nb: &b [*a,*a]\ndependencies: [numpy]\n";
    let table: &[(&str, Code, &str, &str)] = &[
        // (text, code, part of the message, part of the fix)
        ("", JobInvalid, "line 1, column 1: the file names no packages", "- python=3.11"),
        ("# nothing\n", JobInvalid, "names no packages", "dependencies"),
        ("name: e\n", JobInvalid, "names no packages", "dependencies"),
        ("dependencies:\n", JobInvalid, "names no packages", "dependencies"),
        ("dependencies: []\n", JobInvalid, "line 1, column 15: the file names no packages", "python"),
        ("dependancies: [numpy]\n", JobInvalid, "names no packages", "did you mean that by `dependancies`?"),
        ("dependencies: numpy\n", JobInvalid, "line 1, column 15: `dependencies`: expected a list", "- "),
        ("dependencies: {numpy: 1}\n", JobInvalid, "expected a list, found a mapping", "- "),
        ("numpy\nscipy\n", JobInvalid, "found a plain value", "`requirements`"),
        ("- numpy\n- scipy\n", JobInvalid, "found a list", "under `dependencies`"),
        ("<html>\n<body>Sign in</body>", JobInvalid, "found a plain value", ""),
        ("dependencies: [numpy\n", JobFile, "line", "brackets"),
        ("name: a\nname: b\ndependencies: [numpy]\n", JobFile, "line 2", ""),
        (
            "dependencies: [a]\n---\ndependencies: [b]\n",
            JobInvalid,
            "line 2, column 1: a second document",
            "one plain",
        ),
        (bomb, JobInvalid, "line 1, column 4: an anchor", "conda env export"),
        ("dependencies:\n- !!python/object:os.system numpy\n", JobInvalid, "line 2, column", "plain YAML"),
        (
            "dependencies:\n- pip\n- npm: [left-pad]\n",
            JobUnsupported,
            "line 3, column 3: a list of `npm`",
            "conda or pip",
        ),
        (
            "dependencies:\n- python: 3.11\n",
            JobInvalid,
            "line 2, column 3: `python: 3.11`",
            "`- python=3.11`",
        ),
        ("dependencies:\n- numpy:\n", JobInvalid, "`numpy:` is not a package", "`- numpy`"),
        ("dependencies:\n- 3.5\n", JobInvalid, "`3.5` is a number, not a package", "python=3.11"),
        ("dependencies:\n-\n- numpy\n", JobInvalid, "says nothing", "remove the line"),
        ("dependencies:\n- [a, b]\n", JobInvalid, "a list inside", "further out"),
        (
            "dependencies:\n- numpy=1.26 extra junk\n",
            JobInvalid,
            "`junk` is one word too many",
            "one package",
        ),
        ("dependencies:\n- numpy=1.26=py39_0 junk\n", JobInvalid, "`junk` is one word too many", ""),
        ("dependencies:\n- scikit learn\n", JobInvalid, "`learn` is no version", "one package on each line"),
        ("dependencies:\n- python=>3.8\n", JobInvalid, "`=>` compares nothing", "write `>=`"),
        ("dependencies:\n- numpy===1.2\n", JobInvalid, "knows no `===`", "`==`"),
        ("dependencies:\n- numpy>=\n", JobInvalid, "ends where a version should follow", ""),
        ("dependencies:\n- python@3.11\n", JobInvalid, "`@` cannot stand", "python=3.11"),
        ("dependencies:\n- python:3.11\n", JobInvalid, "`:3.11` is no version", "`- python=1.2`"),
        ("dependencies:\n- ../evil\n", JobUnsupported, "names a file", "conda_lock"),
        ("dependencies:\n- con/../x\n", JobInvalid, "is no version", ""),
        ("dependencies:\n- \"numpy; sys_platform == 'win32'\"\n", JobInvalid, "`;` cannot stand", "only pip"),
        ("dependencies:\n- dask[complete]\n", JobInvalid, "no extras", "pip"),
        ("dependencies:\n- numpy[version=1\n", JobInvalid, "brackets", "close them"),
        ("dependencies:\n- \"{{ name }}\"\n", JobInvalid, "`{` cannot stand", "replaced"),
        ("dependencies:\n- nümpy\n", JobInvalid, "`ü` cannot stand", ""),
        ("dependencies:\n- \"numpy\\a\"\n", JobInvalid, "control character", ""),
        ("dependencies:\n- -r requirements.txt\n", JobInvalid, "option of pip", "- pip:"),
        ("dependencies:\n- git+https://host/a/b.git\n", JobInvalid, "is for pip", "- pip:"),
        (
            "dependencies:\n- https://host/c/linux-64/a-1-0.conda\n",
            JobUnsupported,
            "names a file",
            "conda_lock",
        ),
        ("dependencies: [pip]\npip: [numpy]\n", JobInvalid, "`pip` stands outside", "- pip:"),
        ("dependencies:\n- pip: numpy\n", JobInvalid, "`pip`: expected a list", "below `- pip:`"),
        (
            "dependencies:\n- pip:\n  - numpy: 1.2\n",
            JobInvalid,
            "line 3, column 5: `pip`: expected a line",
            "numpy==",
        ),
        ("dependencies:\n- pip:\n  -\n", JobInvalid, "found nothing", "remove the line"),
        ("dependencies:\n- pip:\n  - |\n    a\n    b\n", JobInvalid, "more than one line", "each entry"),
        ("dependencies:\n- pip:\n  - -r r.txt\n", JobUnsupported, "`-r r.txt` names a file", "agentctl"),
        (
            "dependencies:\n- pip:\n  - -e ../..\n",
            JobUnsupported,
            "directory of this machine",
            "code directory",
        ),
        ("dependencies:\n- pip:\n  - -e git+https://h/x.git\n", JobUnsupported, "editable", "leave out `-e`"),
        ("dependencies:\n- pip:\n  - --find-links /etc\n", JobUnsupported, "on this machine", "index"),
        ("dependencies:\n- pip:\n  - ./a.whl\n", JobUnsupported, "`./a.whl` names a path", "index"),
        ("dependencies:\n- pip:\n  - -c c.txt\n", JobUnsupported, "constraints file", "versions"),
        ("dependencies:\n- pip:\n  - [a, [b]]\n", JobInvalid, "found a list", ""),
        (
            "channels: conda-forge\ndependencies: [a]\n",
            JobInvalid,
            "`channels`: expected a list",
            "[conda-forge]",
        ),
        ("channels: [{a: b}]\ndependencies: [a]\n", JobInvalid, "`channels`: expected a plain value", ""),
        ("channels: ['']\ndependencies: [a]\n", JobInvalid, "says nothing", ""),
        ("channels: [./mine]\ndependencies: [a]\n", JobUnsupported, "folder of your machine", "file:///"),
        ("channels: [/srv/mine]\ndependencies: [a]\n", JobUnsupported, "folder of your machine", "file:///"),
        ("channels: [local]\ndependencies: [a]\n", JobUnsupported, "folder of your machine", "file:///"),
        ("channels: ['C:\\mine']\ndependencies: [a]\n", JobInvalid, "cannot stand", "conda-forge"),
        ("channels: ['s3://b/c']\ndependencies: [a]\n", JobUnsupported, "`s3://`", "https://"),
        ("channels: ['file:///a/../etc']\ndependencies: [a]\n", JobInvalid, "no whole address", ""),
        ("channels: ['a b']\ndependencies: [a]\n", JobInvalid, "` ` cannot stand", ""),
        (
            "variables: {1A: x}\ndependencies: [a]\n",
            JobInvalid,
            "line 1, column 13: `variables`: `1A`",
            "digits",
        ),
        ("variables: {A: [x]}\ndependencies: [a]\n", JobInvalid, "`variables.A`: expected a plain value", ""),
        ("variables: [A]\ndependencies: [a]\n", JobInvalid, "`variables`: expected a mapping", ""),
        ("name: [a]\ndependencies: [a]\n", JobInvalid, "`name`: expected a plain value", ""),
    ];
    for (text, code, what, fix) in table {
        let fault = parse(text).map(|read| panic!("{text}: {read:?}")).unwrap_err();
        assert_eq!(fault.code, *code, "{text}: {fault}");
        assert!(fault.what.contains(what), "{text}: {}", fault.what);
        assert!(fault.what.starts_with("line "), "{text}: {}", fault.what);
        assert!(fault.fix.as_ref().is_some_and(|said| said.contains(fix)), "{text}: {:?}", fault.fix);
    }
}

#[test]
fn test_credentials_are_refused_and_never_repeated() {
    for text in [
        "channels: ['https://me:hunter2@host/c']\ndependencies: [a]\n",
        "channels: ['https://hunter2@host/c']\ndependencies: [a]\n",
        "channels: ['https://host/t/hunter2/c']\ndependencies: [a]\n",
        "dependencies: ['https://me:hunter2@host/c::numpy']\n",
        "dependencies: [pip, pip: [--extra-index-url https://me:hunter2@host/s]]\n",
        "dependencies: [pip, pip: ['a @ git+https://hunter2@host/a.git']]\n",
        "dependencies: [pip, pip: [['-i https://me:hunter2@host/s']]]\n",
    ] {
        let fault = parse(text).unwrap_err();
        assert_eq!(fault.code, Code::JobInvalid);
        let said = format!("{fault} {:?}", fault.fix);
        assert!(said.contains("credentials") && !said.contains("hunter2"), "{said}");
        assert!(said.contains("netrc") || said.contains("conda_credentials"), "{said}");
    }
}

#[test]
fn test_hostile_sizes_end_soon() {
    let large = format!("dependencies:\n{}", "- numpy\n".repeat(10 << 17));
    let fault = parse(&large).unwrap_err();
    assert!(fault.what.contains("more than 1 MiB"), "{fault}");
    let most = format!("dependencies:\n{}", "- numpy\n".repeat(100_000));
    assert_eq!(parse(&most).unwrap().0.specs.len(), 100_000);
    let mut bomb = String::from("dependencies: [numpy]\na0: &a0 [x,x,x,x,x,x,x,x,x]\n");
    for i in 1..40 {
        bomb += &format!("a{i}: &a{i} [{}]\n", [format!("*a{}", i - 1).as_str(); 9].join(","));
    }
    assert!(parse(&bomb).is_err());
    for deep in ["[", "{dependencies: ", "- ", "dependencies: [{pip: ["] {
        assert!(parse(&deep.repeat(40_000)).is_err());
    }
}

#[test]
fn test_normalized_packages_compare_by_meaning() {
    let normalized = |specs: &str| read_ok(&format!("dependencies: [{specs}]")).0.normalized_specs();
    assert_eq!(
        normalized("'NumPy >= 1.26', python=3.11"),
        normalized("python=3.11, 'numpy>=1.26', 'numpy >=1.26'")
    );
    assert_ne!(normalized("numpy"), normalized("numpy=1"));
    assert_eq!(normalized("conda-forge::Flask"), ["conda-forge::flask"]);
    let (file, _) = read_ok("channels: [b]\ndependencies: [a::x, b::y, 'https://h/c/::z', a::w]\n");
    assert_eq!(texts(&file.channels_of_specs()), ["a", "https://h/c/"]);
    assert_eq!(file.spec_of("z").unwrap().text, "https://h/c/::z");
}

#[test]
fn test_included_files_take_the_place_of_their_line() {
    let read = |path: &str| match path {
        "r.txt" => Ok(vec!["numpy>=1.2".to_owned(), "b[x]; python_version>'3' and \"q\"".to_owned()]),
        "empty.txt" => Ok(Vec::new()),
        other => Err(Fault::new(Code::JobFile, format!("no {other}"))),
    };
    let text = "\u{feff}name: ü\r\ndependencies:\r\n- pip\r\n- pip:\r\n  - a\r\n  - -r r.txt   # ours\r\n\
                \x20 - '--requirement=empty.txt'\r\n  - c\r\n  - -r https://host/r.txt\r\n";
    let inlined = inline(text, read).unwrap();
    assert_eq!(inlined.lines().count(), text.lines().count());
    let (file, warnings) = read_ok(&inlined);
    assert_eq!(warnings, [""; 0]);
    let lines: Vec<(&str, usize)> = file.pip.iter().map(|line| (line.text.as_str(), line.line)).collect();
    let included = "b[x]; python_version>'3' and \"q\"";
    assert_eq!(lines, [("a", 5), ("numpy>=1.2", 6), (included, 6), ("c", 8), ("-r https://host/r.txt", 9)]);
    let json = r#"{"dependencies": ["pip", {"pip": ["a", "-r r.txt", "c"]}]}"#;
    assert_eq!(texts(&read_ok(&inline(json, read).unwrap()).0.pip), ["a", "numpy>=1.2", included, "c"]);
    let long = "dependencies: [pip, pip: [-r x]]";
    let long = inline(long, |_| Ok(vec!["package==1.0".to_owned(); 3000])).unwrap();
    assert_eq!(read_ok(&long).0.pip.len(), 3000);
    assert_eq!(inline("dependencies: [pip, pip: [-r gone]]", read).unwrap_err().what, "no gone");
    assert_eq!(inline("dependencies: [a]", read).unwrap(), "dependencies: [a]");
    assert!(inline("dependencies: [", read).is_err());
}

#[test]
fn test_a_lock_is_read_and_written() {
    let (sha, md5) = ("ab".repeat(32), "0f".repeat(16));
    let text = format!(
        "# This file may be used to create an environment using:\r\n# platform: linux-64\r\n@EXPLICIT\r\n\
         https://host/c/linux-64/python-3.11.9-0.conda#sha256:{sha}\r\n\
         https://host/c/noarch/tzdata-2024a-0.tar.bz2#{md5}\nfile:///srv/c/noarch/x-1!2.0-0.conda\n\
         # pip six @ https://host/six-1.16-py2.py3-none-any.whl#sha256={sha}\n# pip idna==3.7 --hash=sha256:{sha}\n"
    );
    let lock = parse_lock(&text).unwrap();
    assert_eq!(lock.platform.as_deref(), Some("linux-64"));
    let names: Vec<_> = lock.packages.iter().map(|package| package.name().unwrap()).collect();
    assert_eq!(names, ["python", "tzdata", "x"]);
    assert_eq!(lock.packages[0].sha256.as_deref(), Some(sha.as_str()));
    assert_eq!(lock.packages[1].md5.as_deref(), Some(md5.as_str()));
    assert_eq!(lock.pip[1], format!("idna==3.7 --hash=sha256:{sha}"));
    assert_eq!(parse_lock(&lock.to_string()).unwrap(), lock);
}

#[test]
fn test_a_lock_names_what_it_lacks_of_a_file() {
    let lock = "@EXPLICIT\nhttps://h/c/linux-64/python-3.11.9-h1_0.conda\nhttps://h/c/noarch/ruamel.yaml-0.18-py_0.conda\n\
                # pip Py_YAML==6.0 --hash=sha256:00\n# pip six @ https://h/six-1.whl#sha256=00\n";
    let lock = parse_lock(lock).unwrap();
    let lacks = |dependencies: &str| {
        let text = format!("dependencies: [{dependencies}]");
        lock.lacks(&parse(&text).unwrap().0).unwrap_or_default()
    };
    for all in [
        "Python",
        "python=3.11",
        "python=3.11.*",
        "python==3.11.9",
        "python>=3.12",
        "conda-forge::python=3.11.9.0",
        "python, {pip: [py.yaml>=5, 'six[x]', ruamel-yaml, --no-deps, 'https://h/x.whl']}",
    ] {
        assert_eq!(lacks(all), "", "{all}");
    }
    for (file, named) in [
        ("python=3.1", "`python=3.1` of"),
        ("python==3.12.1", "`python==3.12.1` of"),
        ("numpy>=2", "`numpy>=2` of"),
        ("python, python-dateutil, {pip: [six, scipy>=1]}", "`python-dateutil`, `scipy>=1` of"),
    ] {
        assert!(lacks(file).contains(named), "{file}: {}", lacks(file));
    }
}

#[test]
fn test_what_is_no_lock_is_refused_with_its_line() {
    let url = "https://host/c/noarch/a-1-0.conda";
    for (text, what) in [
        (String::new(), "line 1, column 1: this is no list"),
        (
            "dependencies: [numpy]\n".to_owned(),
            "line 1, column 1: `dependencies: [numpy]` is not the address",
        ),
        (format!("{url}\n"), "no line `@EXPLICIT`"),
        ("@EXPLICIT\n".to_owned(), "has no packages"),
        (format!("@EXPLICIT\n{url}#sha256:12\n"), "line 2, column 1: the digest"),
        ("@EXPLICIT\nhttps://host/index.html\n".to_owned(), "line 2, column 1: `https://host/index.html`"),
        ("@EXPLICIT\nhttps://me:hunter2@host/a-1-0.conda\n".to_owned(), "credentials"),
        ("@EXPLICIT\nhttps://host/t/hunter2/a-1-0.conda\n".to_owned(), "credentials"),
        (format!("@EXPLICIT\n{url}\n# pip ./a.whl\n"), "line 3, column 1: `./a.whl`"),
        ("@EXPLICIT\nhttps://host/../a-1-0.conda\n".to_owned(), "no whole address"),
        ("x".repeat(2 << 20), "more than 1 MiB"),
    ] {
        let fault = parse_lock(&text).unwrap_err();
        assert!(fault.what.contains(what), "{text:.80}: {fault}");
        assert!(!fault.to_string().contains("hunter2") && fault.fix.is_some());
    }
}

/// Files of the shapes that people keep in their repositories: packages, lines for pip, and what is warned of.
#[test]
fn test_files_as_people_have_them_are_read() {
    let no_pip = "`pip` is not among the dependencies";
    let prefix = "`prefix` has no effect";
    let table: &[(&str, usize, usize, &[&str])] = &[
        ("azureml-project-environment", 3, 3, &[no_pip]),
        ("azureml-v2-conda", 6, 8, &[]),
        ("bioinformatics", 6, 0, &[]),
        ("dask-distributed", 2, 5, &[]),
        ("exported-linux", 18, 4, &[prefix]),
        ("exported-no-builds", 11, 0, &[prefix]),
        ("geospatial-nonsense-name", 5, 0, &["`name` is not one", "`auto_update` is not known"]),
        ("pip-only", 0, 5, &["`default` is a channel", no_pip]),
        ("pip-requirements", 3, 3, &[]),
        ("pip-torch-index", 3, 6, &[]),
        ("pytorch-cuda12", 6, 4, &[no_pip]),
        ("pytorch-cudatoolkit", 10, 3, &[]),
        ("r-tidyverse", 6, 0, &[]),
        ("rapids", 5, 0, &["`platforms` is not known"]),
        ("reinforcement-learning", 5, 2, &[]),
        ("solvable-channel-names", 3, 0, &[]),
        ("solvable-crlf", 3, 0, &[]),
        ("solvable-nodefaults-pip", 4, 0, &[]),
        ("solvable-python-only", 1, 0, &[]),
        ("solvable-ranges", 5, 0, &[]),
        ("solvable-scikit-learn", 3, 0, &[]),
        ("tensorflow-gpu", 8, 0, &[]),
        ("tensorflow-keras-pip", 2, 3, &["is Python 3.9.0 alone"]),
    ];
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/environments");
    let files = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        files.map(|file| file.unwrap().file_name().into_string().unwrap().replace(".yml", "")).collect();
    names.sort_unstable();
    assert_eq!(names, table.iter().map(|(name, ..)| (*name).to_owned()).collect::<Vec<_>>());
    for (name, specs, pip, expected) in table {
        let text = std::fs::read_to_string(format!("{folder}/{name}.yml")).unwrap();
        let text = inline(&text, |path| Ok(vec![format!("from-{}", path.len())])).unwrap();
        let (file, warnings) = read_ok(&text);
        assert_eq!((file.specs.len(), file.pip.len()), (*specs, *pip), "{name}: {file:?}");
        assert_eq!(warnings.len(), expected.len(), "{name}: {warnings:?}");
        for (warning, expected) in warnings.iter().zip(*expected) {
            assert!(warning.contains(expected), "{name}: {warning}");
        }
        for line in &file.specs {
            let written = text.lines().nth(line.line - 1).unwrap();
            assert!(
                written.to_lowercase().contains(&spec::name(&line.text)),
                "{name}: {line:?} is not {written:?}"
            );
        }
        assert!(!file.to_string().is_empty());
    }
}

/// Pieces that files are made of, and that break them.
fn pieces() -> impl Strategy<Value = String> {
    let words = prop::sample::select(vec![
        "dependencies",
        "channels",
        "name",
        "pip",
        "variables",
        ":",
        ": ",
        "- ",
        "\n",
        "\n  ",
        "\n  - ",
        "[",
        "]",
        "{",
        "}",
        ", ",
        "'",
        "\"",
        "#",
        " #",
        "|",
        ">",
        "&a ",
        "*a",
        "!t ",
        "---\n",
        "...",
        "\r\n",
        "\u{feff}",
        "::",
        "=",
        ">=",
        "numpy",
        "python=3.11",
        "-r x",
        "https://u:p@h/",
        "${",
        "é",
        "\t",
        "\0",
        "? ",
        "%",
        "null",
        "1e3",
        "\\",
        "@",
    ]);
    prop::collection::vec(prop_oneof![4 => words.prop_map(str::to_owned), 1 => any::<String>()], 0..40)
        .prop_map(|parts| parts.concat())
}

proptest! {
    #[test]
    fn test_reading_never_panics(text in pieces()) {
        let _ = parse(&text);
        let _ = parse_lock(&text);
        let _ = inline(&text, |_| Ok(vec!["a".to_owned(), "\"'\n".to_owned()]));
        let _ = parse(&one(&text));
        let _ = parse(&format!("dependencies:\n- pip:\n  - {text}"));
    }

    #[test]
    fn test_a_tidy_package_stays_as_it_is(text in "[a-zA-Z0-9_:/ =<>!~,|.*\\[\\]'\"-]{0,30}") {
        if let Ok((tidy, _)) = spec::tidy(&text) {
            prop_assert_eq!(&spec::tidy(&tidy).unwrap().0, &tidy);
            let normalized = spec::normalized(&tidy);
            prop_assert_eq!(spec::normalized(&normalized), normalized);
        }
    }
}
